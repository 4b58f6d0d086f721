"""The batch of a step: the rows of all strategies as one input of the model, and attention for each strategy's rows.

Rows are grouped by strategy, with decode rows first in each group; `row_order` maps them to the rows that were passed
in. Knows plans and rows; not how a strategy stores keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.errors import StrategyError
from kernels.ops import AttentionSlice
from kernels.tracing import Tracer
from server.records import Compaction


class RowInput(NamedTuple):
    """A row of a step, the ids of its tokens, and the number of its last tokens whose logits are needed."""

    cache: KVCache
    row: Row
    tokens: Sequence[int]
    num_logits: int


class BatchPart(NamedTuple):
    """One strategy's part of the batch."""

    cache: KVCache
    plan: Plan


class Batch:
    """One step's input of the model, and its attention: implements `kernels.ops.Attention`."""

    def __init__(
        self, work: Sequence[RowInput], device: torch.device | str = "cpu", tracer: Tracer | None = None
    ) -> None:
        """Plan the rows of every strategy and copy token ids to the device. Raises StrategyError."""
        self.compactions: dict[int, Compaction] = {}  # by row of the batch, once it is committed
        self._tracer = tracer or Tracer()
        self.row_order = _order_rows(work)  # for each row of the batch, its index in `work`
        self._rows = [work[i] for i in self.row_order]
        ids: list[int] = []
        positions: list[int] = []
        logit_index: list[int] = []
        planned = list(self._plan())
        self.parts = [part for part, _ in planned]
        self.slices = [each for _, each in planned]
        starts = (position for part in self.parts for position in part.plan.list_positions())
        for (_, (_, num_tokens), tokens, num_logits), start in zip(self._rows, starts, strict=True):
            ids += tokens
            positions += range(start, start + num_tokens)
            logit_index += range(len(positions) - num_logits, len(positions))
        # One blocking copy: on mps a non-blocking copy reads the host memory later, when it may have been freed.
        packed = torch.from_numpy(np.array(ids + positions + logit_index, np.int64)).to(device)
        self.input_ids, self.positions, self.logit_index = packed.split_with_sizes(
            (len(ids), len(ids), len(logit_index))
        )

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention of all N tokens, strategy by strategy: q [N,Hq,D], k [N,H,D], v [N,H,Dv] -> [N,Hq,Dv].

        Raises StrategyError if a strategy that computes its own attention is at fault.
        """
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        # With one strategy the tensors are not sliced, which saves time in every layer
        is_single = len(self.parts) == 1
        for (cache, plan), (at, *_) in zip(self.parts, self.slices, strict=True):
            tensors = (q, k, v, out) if is_single else (q[at], k[at], v[at], out[at])
            cache.attend(plan, layer_idx, *tensors)
        return out

    def check_plans(self) -> None:
        """Raise StrategyError if a strategy's addresses are wrong; called to find the cause of a failed step."""
        for cache, plan in self.parts:
            cache.check_plan(plan)

    @property
    def logit_counts(self) -> list[int]:
        """For each row of the batch, the number of its tokens whose logits are computed."""
        return [item.num_logits for item in self._rows]

    def commit(self, num_entered: Sequence[int] | None = None) -> dict[int, StrategyError]:
        """Commit the first num_entered[i] tokens of each row i; None: all tokens of all rows. Then compact the seats.

        Return the errors of rows whose strategies failed to commit or to compact them; all others are done, and
        `compactions` has those that were compacted.
        """
        counts = [item.row.num_tokens for item in self._rows] if num_entered is None else num_entered
        tokens = [item.tokens[:count] for item, count in zip(self._rows, counts, strict=True)]
        failed: dict[int, StrategyError] = {}
        end = 0
        for cache, plan in self.parts:
            begin, end = end, end + len(plan.rows)
            try:
                cache.commit(plan, tokens[begin:end])
            except StrategyError as error:
                failed |= dict.fromkeys(range(begin, end), error)
                continue
            if cache.compacts:
                failed |= self._compact(cache, begin, [row.seat for row in plan.rows])
        return failed

    def _compact(self, cache: KVCache, first_row: int, seats: Sequence[Seat]) -> dict[int, StrategyError]:
        """Compact the seats of a strategy's rows; return the errors of those that could not be compacted, by row."""
        failed: dict[int, StrategyError] = {}
        with self._tracer.span("compact"):
            for i, seat in enumerate(seats, first_row):
                match _compact_seat(cache, seat):
                    case StrategyError() as error:
                        failed[i] = error
                    case Compaction() as compaction:
                        self.compactions[i] = compaction
        return failed

    def _plan(self) -> Iterator[tuple[BatchPart, AttentionSlice]]:
        end = 0
        for cache, items in groupby(self._rows, key=lambda item: item.cache):
            rows = [item.row for item in items]
            begin, end = end, end + sum(row.num_tokens for row in rows)
            plan = cache.plan(rows)
            locations = plan.list_kv_locations(len(cache.setup.geometry.layers))
            hook = partial(cache.attend, plan)
            yield BatchPart(cache, plan), AttentionSlice(slice(begin, end), locations, plan.query_tap, hook)


def _compact_seat(cache: KVCache, seat: Seat) -> Compaction | StrategyError | None:
    """Compact a seat, and try it once more if that fails.

    Return the compaction (of both tries), or the error of the second try; None if nothing was compacted.
    """
    began = time.perf_counter()
    try:
        dropped = cache.compact(seat)
    except StrategyError:
        try:
            dropped = cache.compact(seat)
        except StrategyError as error:
            return error
    return None if dropped is None else Compaction(time.perf_counter() - began, dropped)


def _order_rows(work: Sequence[RowInput]) -> list[int]:
    """Return the indices of the rows grouped by strategy, with decode rows (one token) first in each group."""
    decode: dict[KVCache, list[int]] = {}
    prefill: dict[KVCache, list[int]] = {}
    for i, (cache, row, _, _) in enumerate(work):
        decode.setdefault(cache, [])
        (decode if row.num_tokens == 1 else prefill).setdefault(cache, []).append(i)
    return [i for cache, rows in decode.items() for i in (*rows, *prefill.get(cache, ()))]
