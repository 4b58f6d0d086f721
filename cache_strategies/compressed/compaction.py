"""Compacts a sequence at a boundary of its text: scores its keys, then moves those that stay to its first slots.

The first phase only reads, so a scorer that fails changes nothing. The second moves the keys within the sequence's own
blocks, one layer after another, and needs no memory but that of one layer. A layer is moved whole or not at all. What
stays is remembered until all layers are moved, so a compaction that is repeated after a failure goes on with the layer
that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.compressed.addresses import AddressGroup
from cache_strategies.compressed.memory import CompressedMemory
from cache_strategies.compressed.options import Budgets, CompressedOptions
from cache_strategies.compressed.pasts import PastReader, keep_states
from cache_strategies.compressed.queries import QueryBuffer
from cache_strategies.compressed.selection import protect, select_top, share_budget
from cache_strategies.compressed.state import (
    CompressedState,
    KeptTokens,
    Move,
    Selection,
    State,
    States,
    count_state_bytes,
)
from cache_strategies.scorers.base import Past, Scorer
from kernels.store import KVStore


class ScoredColumn(NamedTuple):
    """The scores of a column's keys, and what the scorer remembers: of each layer, `Past.state` and `key_state`."""

    scores: Tensor  # [layers, heads of the column, S]
    states: Sequence[tuple[State, State]]


@dataclass
class Compactor:
    """Compacts the sequences of one cache."""

    setup: CacheSetup
    options: CompressedOptions
    memory: CompressedMemory
    budgets: Budgets
    scorer: Scorer
    queries: QueryBuffer | None

    @torch.inference_mode()
    def compact(self, sequence: CompressedState) -> bool:
        """Drop the keys of a sequence at a boundary that exceed the budgets; return whether there are any."""
        if sequence.move is None:
            sequence.move = self._choose(sequence)
        move = sequence.move
        self._move(move)
        selections = move.selections
        for number in range(move.num_finished, len(selections)):
            self._finish(sequence, number, selections[number])
            move.num_finished = number + 1
        sequence.states, sequence.state_bytes = move.states, count_state_bytes(move.states)
        sequence.boundary, sequence.move = sequence.length, None
        return any(selection is not None for selection in selections)

    # ---------------------------------------------------------------- which keys stay
    def _choose(self, sequence: CompressedState) -> Move:
        states = dict(sequence.states)
        selections = [self._select(sequence, number, group, states) for number, group in enumerate(self.memory.groups)]
        return Move(selections, states)

    def _select(self, sequence: CompressedState, number: int, group: AddressGroup, states: States) -> Selection | None:
        """Return which keys of a group stay; None if all do. What the scorer remembers is replaced in `states`."""
        kept = sequence.groups[number]
        budget = self.budgets.count_kept(group.layers[0], sequence.length)
        is_full = kept.exceeds(budget, sequence.num_new)
        if not is_full and (group.window is not None or self.scorer.num_queries is not None):
            return None
        positions = kept.list_positions(sequence.boundary, sequence.length)
        if group.window is not None:  # its next query sees the latest tokens
            total = positions[0].shape[2]
            latest = torch.arange(total - budget, total, device=positions[0].device)
            return self._make_selection(kept, positions, [latest.expand(*positions[0].shape[:2], -1)])
        reader = PastReader(self.memory, self.queries, sequence, number, states, budget)
        columns = [self._score_column(reader, group, *each) for each in enumerate(positions)]
        options = self.options
        scores = [
            protect(column.scores, each, sequence.length, options.sinks, options.recent)
            for column, each in zip(columns, positions, strict=True)
        ]
        counts = self._count_by_column(scores, budget) if is_full else [each.shape[-1] for each in scores]
        indices = [select_top(each, count) for each, count in zip(scores, counts, strict=True)]
        for number_of_column, (column, index) in enumerate(zip(columns, indices, strict=True)):
            for layer, of_layer, remembered in zip(group.layers, index, column.states, strict=True):
                if any(remembered):
                    states[layer, number_of_column] = keep_states(remembered, of_layer)
        return self._make_selection(kept, positions, indices) if is_full else None

    def _score_column(self, reader: PastReader, group: AddressGroup, column: int, positions: Tensor) -> ScoredColumn:
        """Return the scores of a column's keys, and what the scorer remembers of each layer."""
        scores, states = [], []
        for layer, of_layer in zip(group.layers, positions, strict=True):
            past = reader.read(layer, column, of_layer)
            scores.append(self._score(past))
            states.append((past.state, past.key_state))
        return ScoredColumn(torch.stack(scores), states)

    def _make_selection(self, kept: KeptTokens, positions: Sequence[Tensor], indices: Sequence[Tensor]) -> Selection:
        """Return the selection of the keys at these indices [layers, heads of the column, kept], by column."""
        size, device = self.memory.block_size, self.setup.memory.device
        src, dst = [], []
        for blocks, index in zip(kept.blocks, indices, strict=True):
            slots = (torch.tensor(blocks)[:, None] * size + torch.arange(size)).flatten().to(device)
            src.append(slots[index.to(device)].transpose(1, 2))
            dst.append(slots[: index.shape[2]])
        stay = [each.gather(2, index) for each, index in zip(positions, indices, strict=True)]
        return Selection(
            [index.shape[2] for index in indices], _pad(stay), torch.cat(src, 1).contiguous(), torch.cat(dst)
        )

    def _count_by_column(self, scores: Sequence[Tensor], budget: int) -> list[int]:
        if len(scores) == 1:
            return [budget]
        return share_budget([each[0, 0] for each in scores], budget)

    def _score(self, past: Past) -> Tensor:
        """Return a layer's scores. Raises ValueError if the scorer returned something else."""
        scores = self.scorer.score(past)
        if not isinstance(scores, Tensor) or scores.shape != past.positions.shape:
            found = list(scores.shape) if isinstance(scores, Tensor) else scores
            raise ValueError(
                f"scorer {self.options.scorer!r} returned {found!r} instead of scores of shape "
                f"{list(past.positions.shape)}"
            )
        return scores

    # ---------------------------------------------------------------- moving them
    def _move(self, move: Move) -> None:
        """Move the keys and values that stay, in the layers that are left to move."""
        for layer in range(move.num_moved, len(self.memory.group_by_layer)):
            number = self.memory.group_by_layer[layer]
            selection = move.selections[number]
            if selection is not None:
                src = selection.src[self.memory.groups[number].layers.index(layer)]
                if self.memory.groups[number].split_heads:
                    src = src[:, 0]
                self._move_layer(move, layer, self.memory.stores[number], src, selection.dst)
            move.num_moved = layer + 1

    def _move_layer(self, move: Move, layer: int, store: KVStore, src: Tensor, dst: Tensor) -> None:
        """Move the keys and values of a layer from slots src to slots dst. If that raises, it is called once more."""
        self.setup.ops.copy_tokens(store, layer, src, dst)

    def _finish(self, sequence: CompressedState, number: int, selection: Selection | None) -> None:
        """Free the blocks of a group that its keys no longer need."""
        kept = sequence.groups[number]
        if selection is None:
            kept.positions = _pad(kept.list_positions(sequence.boundary, sequence.length))
            kept.counts = [count + sequence.num_new for count in kept.counts]
            return
        kept.counts, kept.positions = list(selection.counts), selection.positions
        for column, count in enumerate(kept.counts):
            self.memory.shrink(number, kept.blocks[column], count)


def _pad(positions: Sequence[Tensor]) -> Tensor:
    """Return positions [layers, heads, S], by column, as one tensor; heads with fewer end with -1."""
    if len(positions) == 1:
        return positions[0]
    most = max(each.shape[2] for each in positions)
    return torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[2]), value=-1) for each in positions], 1)
