"""The batch of a step: the rows of all strategies as one input of the model, and attention for each strategy's rows.

Rows are grouped by strategy, with decode rows first in each group; `row_order` maps them to the rows that were passed
in. Knows plans and rows; not how a strategy stores keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache_strategies.base import Row, Seat
from cache_strategies.errors import StrategyError
from kernels.ops import AttentionSlice, KVLocation, QueryTap
from kernels.tracing import Tracer
from server.engine.instance import Instance, PlannedRows
from server.records import Compaction


class RowInput(NamedTuple):
    """A row of a step, the ids of its tokens, and the number of its last tokens whose logits are needed."""

    instance: Instance
    row: Row
    tokens: Sequence[int]
    num_logits: int


class BatchPart(NamedTuple):
    """One strategy's part of the batch."""

    instance: Instance
    rows: Sequence[Row]
    planned: PlannedRows


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
        starts = (position for part in self.parts for position in part.planned.positions)
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
        for part, each in zip(self.parts, self.slices, strict=True):
            tokens = each.tokens
            tensors = (q, k, v, out) if is_single else (q[tokens], k[tokens], v[tokens], out[tokens])
            location = each.kv_locations[layer_idx]
            if location is None:
                part.instance.attend(part.planned.plan, layer_idx, *tensors)
            else:
                _attend_at(location, each.query_tap, part.instance, layer_idx, *tensors)
        return out

    def check_plans(self) -> None:
        """Raise StrategyError if a strategy's addresses are wrong; called to find the cause of a failed step."""
        for instance, rows, planned in self.parts:
            instance.check_plan(planned, rows)

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
        for instance, rows, planned in self.parts:
            begin, end = end, end + len(rows)
            try:
                instance.commit(planned.plan, tokens[begin:end])
            except StrategyError as error:
                failed |= dict.fromkeys(range(begin, end), error)
                continue
            if instance.compacts:
                failed |= self._compact(instance, begin, [row.seat for row in rows])
        return failed

    def _compact(self, instance: Instance, first_row: int, seats: Sequence[Seat]) -> dict[int, StrategyError]:
        """Compact the seats of a strategy's rows; return the errors of those that could not be compacted, by row."""
        failed: dict[int, StrategyError] = {}
        with self._tracer.span("compact"):
            for i, seat in enumerate(seats, first_row):
                try:
                    compaction = instance.compact(seat)
                except StrategyError as error:
                    failed[i] = error
                else:
                    if compaction is not None:
                        self.compactions[i] = compaction
        return failed

    def _plan(self) -> Iterator[tuple[BatchPart, AttentionSlice]]:
        end = 0
        for instance, items in groupby(self._rows, key=attrgetter("instance")):
            rows = [item.row for item in items]
            begin, end = end, end + sum(row.num_tokens for row in rows)
            planned = instance.plan(rows)
            hook = partial(instance.attend, planned.plan)
            tap = planned.plan.query_tap
            yield BatchPart(instance, rows, planned), AttentionSlice(slice(begin, end), planned.locations, tap, hook)


def _attend_at(
    location: KVLocation, tap: QueryTap | None, instance: Instance, layer_idx: int, *tensors: Tensor
) -> None:
    """Write keys and values to the addresses of a strategy, and attend to those there."""
    q, k, v, out = tensors
    ops, spec = instance.setup.ops, instance.setup.geometry.layers[layer_idx]
    ops.write_kv(location.store, layer_idx, k, v, location.at)
    ops.attend(out, q, location.store, layer_idx, location.at, spec, window=location.window)
    if tap is not None and (queries := tap.queries[layer_idx]) is not None:
        queries.copy_(q[tap.tokens])


def _order_rows(work: Sequence[RowInput]) -> list[int]:
    """Return the indices of the rows grouped by strategy, with decode rows (one token) first in each group."""
    decode: dict[Instance, list[int]] = {}
    prefill: dict[Instance, list[int]] = {}
    for i, (instance, row, _, _) in enumerate(work):
        decode.setdefault(instance, [])
        (decode if row.num_tokens == 1 else prefill).setdefault(instance, []).append(i)
    return [i for instance, rows in decode.items() for i in (*rows, *prefill.get(instance, ()))]
