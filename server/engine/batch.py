"""The batch of a step: the rows of all strategies as one input of the model, and attention for each strategy's rows.

Rows are grouped by strategy, with decode rows first in each group; `row_order` maps them to the rows that were passed
in. Knows plans and rows; not how a strategy stores keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from kernels.ops import AttentionSlice
from server.engine.isolation.errors import StrategyError


class RowInput(NamedTuple):
    """A row of a step, the ids of its tokens, and the number of its last tokens whose logits are needed."""

    cache: KVCache
    row: Row
    tokens: Sequence[int]
    num_logits: int


class FailedRow(NamedTuple):
    """A row of a batch whose strategy failed to commit or to compact it."""

    row: int  # its index in the batch
    error: StrategyError


class _Part(NamedTuple):
    """One strategy's part of the batch."""

    cache: KVCache
    plan: Plan


class Batch:
    """One step's input of the model, and its attention: implements `kernels.ops.Attention`."""

    def __init__(self, work: Sequence[RowInput], device: torch.device | str = "cpu") -> None:
        """Plan the rows of every strategy and copy token ids to the device. Raises StrategyError."""
        self.row_order = _order_rows(work)  # for each row of the batch, its index in `work`
        self._rows = [work[i] for i in self.row_order]
        ids: list[int] = []
        positions: list[int] = []
        logit_index: list[int] = []
        for _, (seat, num_tokens), tokens, num_logits in self._rows:
            ids += tokens
            positions += range(seat.length, seat.length + num_tokens)
            logit_index += range(len(positions) - num_logits, len(positions))
        planned = list(self._plan())
        self._parts = [part for part, _ in planned]
        self.slices = [each for _, each in planned]
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
        is_single = len(self._parts) == 1
        for (cache, plan), (at, *_) in zip(self._parts, self.slices, strict=True):
            tensors = (q, k, v, out) if is_single else (q[at], k[at], v[at], out[at])
            cache.attend(plan, layer_idx, *tensors)
        return out

    def check_plans(self) -> None:
        """Raise StrategyError if a strategy's addresses are wrong; called to find the cause of a failed step."""
        for cache, plan in self._parts:
            cache.check_plan(plan)

    @property
    def logit_counts(self) -> list[int]:
        """For each row of the batch, the number of its tokens whose logits are computed."""
        return [item.num_logits for item in self._rows]

    def commit(self, num_entered: Sequence[int] | None = None) -> list[FailedRow]:
        """Commit the first num_entered[i] tokens of each row i; None: all tokens of all rows. Then compact the seats.

        Return the rows of strategies that failed to commit, and rows that could not be compacted; all others are done.
        """
        counts = [item.row.num_tokens for item in self._rows] if num_entered is None else num_entered
        tokens = [item.tokens[:count] for item, count in zip(self._rows, counts, strict=True)]
        failed: list[FailedRow] = []
        end = 0
        for cache, plan in self._parts:
            begin, end = end, end + len(plan.rows)
            try:
                cache.commit(plan, tokens[begin:end])
            except StrategyError as error:
                failed += [FailedRow(i, error) for i in range(begin, end)]
                continue
            for i, row in enumerate(plan.rows, begin):
                if (problem := _compact(cache, row.seat)) is not None:
                    failed.append(FailedRow(i, problem))
        return failed

    def _plan(self) -> Iterator[tuple[_Part, AttentionSlice]]:
        end = 0
        for cache, items in groupby(self._rows, key=lambda item: item.cache):
            rows = [item.row for item in items]
            begin, end = end, end + sum(row.num_tokens for row in rows)
            plan = cache.plan(rows)
            locations = plan.list_kv_locations(len(cache.setup.geometry.layers))
            hook = partial(cache.attend, plan)
            yield _Part(cache, plan), AttentionSlice(slice(begin, end), locations, plan.query_tap, hook)


def _compact(cache: KVCache, seat: Seat) -> StrategyError | None:
    """Compact a seat, and try it once more if that fails; return the error of the second try."""
    try:
        cache.compact(seat)
    except StrategyError:
        try:
            cache.compact(seat)
        except StrategyError as error:
            return error
    return None


def _order_rows(work: Sequence[RowInput]) -> list[int]:
    """Return the indices of the rows grouped by strategy, with decode rows (one token) first in each group."""
    decode: dict[KVCache, list[int]] = {}
    prefill: dict[KVCache, list[int]] = {}
    for i, (cache, row, _, _) in enumerate(work):
        decode.setdefault(cache, [])
        (decode if row.num_tokens == 1 else prefill).setdefault(cache, []).append(i)
    return [i for cache, rows in decode.items() for i in (*rows, *prefill.get(cache, ()))]
