"""One step's tokens of all strategies, as the model sees them. Knows plans and rows; not how a strategy keeps its keys.

Rows are ordered by strategy, and of a strategy's decode rows come first; `order` maps back to the order they were given
in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row
from kernels.ops import KVLocation


class StrategyError(Exception):
    """A strategy's plan or attend failed; the rest of the step is sound."""

    def __init__(self, instance: str, cause: Exception) -> None:
        super().__init__(f"cache strategy {instance!r} failed: {type(cause).__name__}: {cause}")
        self.instance = instance


class RowInput(NamedTuple):
    """A row of the step, the ids that enter, and how many of its last positions want logits."""

    cache: KVCache
    row: Row
    tokens: Sequence[int]
    num_logits: int


class _Slice(NamedTuple):
    """One strategy's part of the batch."""

    cache: KVCache
    plan: Plan
    token_slice: slice


class Batch:
    """Implements `kernels.ops.Attention` for one step."""

    def __init__(self, work: Sequence[RowInput], device: torch.device | str = "cpu") -> None:
        """Plans every strategy's rows. Raises StrategyError."""
        self.row_order = _order_rows(work)
        self._rows = [work[i] for i in self.row_order]
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for _, (seat, num_tokens), tokens, logits in self._rows:
            ids += tokens
            positions += range(seat.length, seat.length + num_tokens)
            wanted += range(len(positions) - logits, len(positions))
        self._slices = list(self._plan())
        # In one copy, waited for: on mps one that is not reads the host's memory later, when it may be gone.
        packed = torch.from_numpy(np.array(ids + positions + wanted, np.int64)).to(device)
        self.input_ids, self.positions, self.logit_index = packed.split((len(ids), len(ids), len(wanted)))

    @property
    def kv_locations(self) -> Sequence[tuple[slice, KVLocation]] | None:
        """Where all strategies keep the batch's keys, if all of them can say it."""
        found = []
        for _, plan, tokens in self._slices:
            if (stored := plan.kv_location) is None:
                return None
            found.append((tokens, stored))
        return found

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every strategy's rows through its own plan. Raises StrategyError."""
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        alone = len(self._slices) == 1  # then nothing has to be cut, layer by layer
        for cache, plan, at in self._slices:
            parts = (q, k, v, out) if alone else (q[at], k[at], v[at], out[at])
            try:
                plan.attend(layer_idx, *parts)
            except Exception as error:
                raise StrategyError(cache.name, error) from error
        return out

    @property
    def logit_counts(self) -> list[int]:
        """Rows of logits that each row of the batch gets."""
        return [item.num_logits for item in self._rows]

    def commit(self, num_entered: Sequence[int] | None = None) -> None:
        """So many tokens of each row entered, its first ones; None: all that were planned."""
        counts = [item.row.num_tokens for item in self._rows] if num_entered is None else num_entered
        tokens = iter([item.tokens[:count] for item, count in zip(self._rows, counts, strict=True)])
        for cache, plan, _ in self._slices:
            cache.commit(plan, [next(tokens) for _ in plan.rows])

    def _plan(self) -> Iterator[_Slice]:
        end = 0
        for cache, items in groupby(self._rows, key=lambda item: item.cache):
            rows = [item.row for item in items]
            begin, end = end, end + sum(row.num_tokens for row in rows)
            try:
                plan = cache.plan(rows)
            except Exception as error:
                raise StrategyError(cache.name, error) from error
            yield _Slice(cache, plan, slice(begin, end))


def _order_rows(work: Sequence[RowInput]) -> list[int]:
    """Rows by strategy, in the order in which these come first; of each, decode rows first."""
    decode: dict[KVCache, list[int]] = {}
    longer: dict[KVCache, list[int]] = {}
    for i, (cache, row, _, _) in enumerate(work):
        decode.setdefault(cache, [])
        (decode if row.num_tokens == 1 else longer).setdefault(cache, []).append(i)
    return [i for cache, rows in decode.items() for i in (*rows, *longer.get(cache, ()))]
