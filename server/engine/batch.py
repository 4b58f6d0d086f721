"""The batch of a step: the rows of all strategies as one input of the model, and attention for each strategy's rows.

Rows are grouped by strategy, with decode rows first in each group; `row_order` maps them to the rows that were passed
in. Knows rows; not how a strategy stores keys.
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

from cache_strategies.base import CacheSetup, KVSequence, Rows
from cache_strategies.errors import StrategyError
from kernels.ops import AttentionSlice, KVLocation, QueryTap
from kernels.tracing import Tracer
from server.engine.instance import Instance, LocatedRows
from server.records import Compaction


class RowInput(NamedTuple):
    """A row of a step: its tokens follow the first `length` of their sequence. The last `num_logits` get logits.

    The last `num_drafts` may be rejected.
    """

    instance: Instance
    sequence: KVSequence
    length: int
    tokens: Sequence[int]
    num_logits: int
    num_drafts: int = 0


class BatchPart(NamedTuple):
    """One strategy's part of the batch."""

    instance: Instance
    located: LocatedRows


class Batch:
    """One step's input of the model, and its attention: implements `kernels.ops.Attention`."""

    def __init__(
        self, work: Sequence[RowInput], device: torch.device | str = "cpu", tracer: Tracer | None = None
    ) -> None:
        """Locate the rows of every strategy and copy token ids to the device. Raises StrategyError."""
        self.num_committed: Sequence[int] = ()  # tokens by row, once the batch is committed
        self.compactions: dict[int, Compaction] = {}  # by row of the batch, once it is committed
        self._tracer = tracer or Tracer()
        self.row_order = _order_rows(work)  # for each row of the batch, its index in `work`
        self._rows = [work[i] for i in self.row_order]
        ids: list[int] = []
        positions: list[int] = []
        logit_index: list[int] = []
        located = list(self._locate())
        self.parts = [part for part, _ in located]
        self.slices = [each for _, each in located]
        starts = (position for part in self.parts for position in part.located.positions)
        for (_, _, _, tokens, num_logits, _), start in zip(self._rows, starts, strict=True):
            ids += tokens
            positions += range(start, start + len(tokens))
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
                part.instance.attend(part.located.rows, layer_idx, *tensors)
            else:
                attend_at(part.instance.setup, location, each.query_tap, layer_idx, *tensors)
        return out

    def check_located(self) -> None:
        """Raise StrategyError if a strategy's addresses are wrong; called to find the cause of a failed step."""
        for instance, located in self.parts:
            instance.check_located(located)

    @property
    def logit_counts(self) -> list[int]:
        """For each row of the batch, the number of its tokens whose logits are computed."""
        return [item.num_logits for item in self._rows]

    def commit(self, num_entered: Sequence[int] | None = None) -> dict[int, StrategyError]:
        """Commit the first num_entered[i] tokens of each row i; None: all tokens of all rows.

        Then compact their sequences. Return the errors of rows whose strategies failed at either; all others are done,
        and `compactions` has those that were compacted. `num_committed` may be less than was asked for, if a model has
        states and only a part of a row entered.
        """
        counts = [len(item.tokens) for item in self._rows] if num_entered is None else list(num_entered)
        self.num_committed = counts
        failed: dict[int, StrategyError] = {}
        end = 0
        for instance, (rows, *_) in self.parts:
            begin, end = end, end + len(rows)
            counts[begin:end] = instance.count_committable(rows, counts[begin:end])
            tokens = [item.tokens[:count] for item, count in zip(self._rows[begin:end], counts[begin:end], strict=True)]
            try:
                instance.commit(rows, tokens)
            except StrategyError as error:
                failed |= dict.fromkeys(range(begin, end), error)
                continue
            if instance.compacts(rows.sequences[0]):
                failed |= self._compact(instance, begin, counts[begin:end])
        return failed

    def _compact(self, instance: Instance, first_row: int, counts: Sequence[int]) -> dict[int, StrategyError]:
        """Compact the sequences of a strategy's rows, of which `counts` tokens were committed; return errors by row."""
        failed: dict[int, StrategyError] = {}
        with self._tracer.span("compact"):
            for i, count in enumerate(counts, first_row):
                row = self._rows[i]
                if not count:
                    continue
                try:
                    compaction = instance.compact(row.sequence, row.length + count)
                except StrategyError as error:
                    failed[i] = error
                else:
                    if compaction is not None:
                        self.compactions[i] = compaction
        return failed

    def _locate(self) -> Iterator[tuple[BatchPart, AttentionSlice]]:
        end = 0
        for instance, group in groupby(self._rows, key=attrgetter("instance")):
            items = list(group)
            drafts = [item.num_drafts for item in items]
            counts = [len(item.tokens) for item in items]
            rows = Rows([item.sequence for item in items], counts, drafts if any(drafts) else None)
            begin, end = end, end + rows.num_tokens
            located = instance.locate(rows, [item.length for item in items])
            hook = partial(instance.attend, rows)
            yield (
                BatchPart(instance, located),
                AttentionSlice(slice(begin, end), located.locations, located.tap, hook, located.states),
            )


def attend_at(setup: CacheSetup, location: KVLocation, tap: QueryTap | None, layer_idx: int, *tensors: Tensor) -> None:
    """Write keys and values to the addresses of a strategy, and attend to those there."""
    q, k, v, out = tensors
    ops, spec = setup.ops, setup.geometry.layers[layer_idx]
    ops.write_kv(location.store, layer_idx, k, v, location.at)
    ops.attend(out, q, location.store, layer_idx, location.at, spec, window=location.window)
    if tap is not None and (queries := tap.queries[layer_idx]) is not None:
        queries.copy_(q[tap.tokens])


def _order_rows(work: Sequence[RowInput]) -> list[int]:
    """Return the indices of the rows grouped by strategy, with decode rows (one token) first in each group."""
    decode: dict[Instance, list[int]] = {}
    prefill: dict[Instance, list[int]] = {}
    for i, (instance, _, _, tokens, *_) in enumerate(work):
        decode.setdefault(instance, [])
        (decode if len(tokens) == 1 else prefill).setdefault(instance, []).append(i)
    return [i for instance, rows in decode.items() for i in (*rows, *prefill.get(instance, ()))]
