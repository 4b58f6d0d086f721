"""Makes what a scorer sees of a sequence at a boundary (`Past`), layer by layer, and keeps what it remembers.

A layer's keys and values are read when the scorer looks at them, and are free again before the next layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cache_strategies.compressed.memory import CompressedMemory
from cache_strategies.compressed.queries import QueryBuffer
from cache_strategies.compressed.state import CompressedState, State, States
from cache_strategies.scorers.base import Past
from kernels.types import LayerSpec


class PastReader:
    """Reads the layers of one group of a sequence; with split heads, each KV head by itself."""

    def __init__(
        self,
        memory: CompressedMemory,
        queries: QueryBuffer | None,
        sequence: CompressedState,
        number: int,
        states: States,
        budget: int,
    ) -> None:
        """Read the `number`-th group, of whose heads `budget` keys stay; `states` has what the scorer remembers."""
        self._memory = memory
        self._sequence = sequence
        self._number = number
        self._states = states
        self._budget = budget
        self._queries: dict[int, Tensor] = {}  # [T, Hq, D] by layer
        if queries is not None:
            self._queries = dict(zip(queries.shape.layers, queries.read(sequence), strict=True))

    def read(self, layer: int, column: int, positions: Tensor) -> Past:
        """Return what the scorer sees of the keys at `positions` [H, S] of a layer, or of its head `column`."""
        sequence, memory, number = self._sequence, self._memory, self._number
        spec, queries = memory.specs[layer], self._queries.get(layer)
        if memory.groups[number].split_heads:
            spec, of_head = _take_head(spec, column)
            queries = None if queries is None else queries[:, of_head]
        state, key_state = self._states.get((layer, column), ({}, {}))
        return Past(
            layer,
            spec,
            sequence.length,
            sequence.num_new,
            positions,
            partial(memory.read_keys, sequence, number, layer, column),
            partial(memory.read_values, sequence, number, layer, column),
            queries,
            dict(state),
            {name: torch.nn.functional.pad(x, (0, sequence.num_new)) for name, x in key_state.items()},
            first_head=column,
            num_kept=self._budget,
        )


def _take_head(spec: LayerSpec, head: int) -> tuple[LayerSpec, slice]:
    """Return a layer of one of the KV heads of a layer, and its query heads."""
    groups = spec.num_q_heads // spec.num_kv_heads
    of_head = slice(head * groups, (head + 1) * groups)
    sinks = None if spec.sink_logits is None else spec.sink_logits[of_head]
    return spec._replace(num_kv_heads=1, num_q_heads=groups, sink_logits=sinks), of_head


def keep_states(states: tuple[State, State], indices: Tensor) -> tuple[State, State]:
    """Return `Past.state` and `Past.key_state` after a boundary, of the keys at `indices` [H, kept]."""
    state, key_state = states
    return state, {name: x.gather(1, indices) for name, x in key_state.items()}
