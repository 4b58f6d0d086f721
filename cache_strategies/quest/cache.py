"""quest: a paged KV cache that keeps all keys, of which a decoded token reads the blocks that may matter most to it.

After Tang et al. 2024 (arXiv:2406.10774). Everything about blocks, their sharing and their eviction is `PagedCache`'s.
Two things differ. In layers without a window of their own each KV head has an allocation in every block, behind whose
keys and values lies their summary (summaries.py). And a decode row (one token) of a long text chooses blocks by their
summaries, in every layer and KV head anew (selection.py), and attends to these; all other rows attend to all keys.

A summary is computed when a block is full and a row is about to choose. A block that is written again has lost it.

Blocks found by prefix have exact keys. What a chosen few keys have gone into differs a little from what the model
computes, and with it the keys of the next layers. So the blocks that a sequence fills from its first choice on get no
hash, and are not found by others. While another seat waits for what a row computes, the row reads all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_strategies.base import CacheSetup, Plan, Row
from cache_strategies.block_table import resolve_kv_dtype
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache
from cache_strategies.paged.layer_groups import LayerGroup, LayerLayout, group_by_window
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.quest.addresses import Chosen, HeadAddresses, HeadGroup
from cache_strategies.quest.options import QuestOptions, selects_in
from cache_strategies.quest.plan import QuestPlan
from cache_strategies.quest.selection import TextSizes
from cache_strategies.quest.summaries import BlockSummaries, compute_summary_bytes
from cache_strategies.types import Geometry
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec


class QuestCache(PagedCache):
    """A paged cache whose decode rows choose the blocks that they read."""

    options: QuestOptions
    options_type = QuestOptions

    def __init__(self, setup: CacheSetup, options: QuestOptions) -> None:
        super().__init__(setup, options)
        self._summaries: BlockSummaries | None = None
        self._groups = list(self._make_groups())
        num_blocks = self.block_layout(options, setup.geometry)[1]
        num_read, seats = options.count_read(num_blocks, self.block_size), setup.geometry.max_seats
        room = num_read if num_read < num_blocks else 0
        every = [HeadAddresses(group, self.table, seats, room, self.block_size) for group in self._groups]
        by_layer = {layer: each for each in every for layer in each.group.layers}
        layers = setup.geometry.layers
        self._addresses = [by_layer.get(layer) for layer in range(len(layers))]
        # Number of KV heads in which rows choose, of all heads
        self._num_choosing = sum(spec.num_kv_heads for spec in layers if selects_in(spec))
        self._num_heads = sum(spec.num_kv_heads for spec in layers)
        # By block: whether its summaries are those of its keys
        self._has_summary: NDArray[np.bool_] = np.zeros(self.store.num_blocks, np.bool_)
        if self._num_choosing and num_read < num_blocks:
            # The keys of a generated token are others if it is computed again as a part of a prompt, exactly
            self.contract = self.contract._replace(exact=False, replayable=False, chunk_invariant=False)

    # ---------------------------------------------------------------- layout
    @classmethod
    def _divide(cls, options: Any, geometry: Geometry) -> LayerLayout:
        block_size, _ = cls.block_layout(options, geometry)
        return group_by_window(geometry.layers, block_size, geometry.max_seq_len, by_head=True)

    @classmethod
    def count_group_bytes(cls, group: LayerGroup, options: Any, geometry: Geometry) -> int:
        if group.window is not None:
            return super().count_group_bytes(group, options, geometry)
        layers, dtype = [geometry.layers[i] for i in group.layers], resolve_kv_dtype(options, geometry)
        heads = [spec._replace(num_kv_heads=1) for spec in layers]
        keys = compute_block_bytes(heads, cls.block_layout(options, geometry)[0], dtype)
        return keys + sum(compute_summary_bytes(spec, dtype) for spec in layers)

    def make_group_store(self, group: LayerGroup, block_size: int, dtype: torch.dtype) -> tuple[Region, KVStore]:
        if group.window is not None:
            return super().make_group_store(group, block_size, dtype)
        size = self.count_group_bytes(group, self.options, self.setup.geometry)
        region = self.setup.memory.region(size, "keys, values and summaries of a head")
        layers = {i: self.setup.geometry.layers[i] for i in group.layers}
        extra = sum(compute_summary_bytes(spec, dtype) for spec in layers.values())
        return region, KVStore(region, layers, block_size, dtype, split_heads=True, extra_bytes=extra)

    def _make_groups(self) -> Iterator[HeadGroup]:
        """Yield the layers in the store of split heads, by number of heads."""
        store = self._stores_by_group[0]
        if store is None:
            return
        layers = {i: self.setup.geometry.layers[i] for i in store.layers}
        self._summaries = summaries = BlockSummaries(store, layers, self.setup.ops)
        for num_heads in sorted({spec.num_kv_heads for spec in layers.values()}):
            numbers = [i for i, spec in layers.items() if spec.num_kv_heads == num_heads]
            yield HeadGroup(numbers, num_heads, store, 0, summaries)

    # ---------------------------------------------------------------- steps
    def plan(self, rows: Sequence[Row[PagedSeat]]) -> QuestPlan:
        if self._copies:
            self._copies.run(self.setup.ops)
        chosen = self._find_choosing(rows)
        if chosen.rows:
            self._summarize([rows[number].seat for number in chosen.rows])
        return QuestPlan(self.setup, rows, chosen, self.table, self.stores, self.store_by_layer, self._addresses)

    def _find_choosing(self, rows: Sequence[Row[PagedSeat]]) -> Chosen:
        """Return the rows that choose blocks. What is written by any row loses its summary."""
        numbers: list[int] = []
        sizes: list[TextSizes] = []
        for number, (seat, num_tokens) in enumerate(rows if self._num_choosing else ()):
            first, end = seat.length // self.block_size, self._blocks_for(seat.length + num_tokens)
            self._has_summary[self.table.host_tables[0, seat.index, first:end]] = False
            if num_tokens == 1:
                size = TextSizes(end, self.options.count_read(end, self.block_size))
                if size.num_read < size.num_blocks and not (self.pending and self._depends_on_others(seat)):
                    numbers.append(number)
                    sizes.append(size)
        return Chosen(numbers, sizes)

    def _depends_on_others(self, seat: PagedSeat) -> bool:
        """Return whether blocks of a seat are computed in this step by others, or others wait for what it computes."""
        first = seat.length // self.block_size
        return any(block in self.pending for block in seat.blocks[:first]) or any(
            self.pending.is_awaited(block) for block in seat.blocks[first:]
        )

    def _summarize(self, seats: Sequence[PagedSeat]) -> None:
        """Compute the missing summaries of the full blocks of seats."""
        tables, full = self.table.host_tables, [seat.length // self.block_size for seat in seats]
        blocks = [tables[0, seat.index, :n] for seat, n in zip(seats, full, strict=True)]
        missing = [np.flatnonzero(~self._has_summary[each]) for each in blocks]
        if not any(map(len, missing)):
            return
        heads = slice(self._columns[0])
        found = [tables[heads, seat.index, at].flatten() for seat, at in zip(seats, missing, strict=True)]
        numbers = torch.from_numpy(np.unique(np.concatenate(found)).astype(np.int64))
        assert self._summaries is not None
        self._summaries.fill(numbers.to(self.table.all_rows.device))
        for each, at in zip(blocks, missing, strict=True):
            self._has_summary[each[at]] = True

    def commit(self, plan: Plan[PagedSeat], tokens: Sequence[Sequence[int]]) -> None:
        assert isinstance(plan, QuestPlan)
        for number in plan.chosen.rows:
            if tokens[number]:
                self._withhold(plan.rows[number].seat)
        super().commit(plan, tokens)

    def _withhold(self, seat: PagedSeat) -> None:
        """Keep what a seat computes from now on from being found by others, who wait for none of it."""
        seat.salt = None
        for block in seat.blocks[seat.length // self.block_size :] if self.pending else ():
            if self.pending.owner(block) is seat:
                heir = self.pending.remove_seat(block, seat)
                assert heir is None, "a row that others wait for reads all keys"
                self._blocks_to_complete.discard(block)
                self.pool.unpublish(block)

    # ---------------------------------------------------------------- reports
    def _count_unread(self, length: int) -> int:
        """Return how many keys of a text the token at position `length` does not read if it chooses blocks."""
        num_blocks = length // self.block_size + 1
        return (num_blocks - self.options.count_read(num_blocks, self.block_size)) * self.block_size

    def count_dropped_tokens(self, seat: PagedSeat) -> int:
        return self._count_unread(seat.length) * self._num_choosing // self._num_heads

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        if selects_in(spec) and self._count_unread(length - 1):
            return None
        return super().visible_positions(length, spec)
