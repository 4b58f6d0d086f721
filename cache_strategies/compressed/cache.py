"""compressed: a KV cache that keeps the keys a scorer ranks highest, and frees the memory of all others.

A text has a boundary at every multiple of `every`, and rows end there. When a sequence has reached one, its scorer
ranks the keys that it holds; the best stay, in order, and are moved together into fresh blocks (compaction.py). Between
boundaries all new keys are kept. So what is kept, and all that is computed from it, does not depend on how a text was
cut into rows, and a sequence that is computed again keeps the same keys.

Addresses count kept keys. RoPE stays as it was computed. Sequences share nothing: each compaction rewrites what a
sequence keeps, so a fork is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, Plan, Row
from cache_strategies.compressed.addresses import AddressGroup
from cache_strategies.compressed.compaction import Compactor
from cache_strategies.compressed.memory import (
    CompressedMemory,
    count_column_blocks,
    count_peak_blocks,
    count_query_blocks,
    list_block_bytes,
)
from cache_strategies.compressed.options import Budgets, CompressedOptions, make_scorer
from cache_strategies.compressed.queries import QueryBuffer
from cache_strategies.compressed.seat import CompressedSeat, KeptTokens
from cache_strategies.types import NO_SALT, Blocks, CacheUsage, Contract, Geometry, Salt, SeatShape
from kernels.ops import KVLocation
from kernels.store import KVStore


class CompressedPlan(Plan[CompressedSeat]):
    """A plan whose layers have the addresses of their group."""

    def __init__(self, cache: CompressedCache, rows: Sequence[Row[CompressedSeat]]) -> None:
        self.rows = rows
        self._cache = cache
        q_start = cache.fill_q_start(rows)
        locations = [
            KVLocation(store, table.make_slots(rows, number, q_start), None)
            for number, (store, table) in enumerate(zip(cache.stores, cache.memory.tables, strict=True))
        ]
        self._locations = [locations[number] for number in cache.memory.group_by_layer]
        self.tapped = None if cache.queries is None else cache.queries.make_tap(rows)
        self.query_tap = None if self.tapped is None else self.tapped[0]

    def kv_location(self, layer_idx: int) -> KVLocation:
        return self._locations[layer_idx]

    def list_kv_locations(self, num_layers: int) -> Sequence[KVLocation]:
        return self._locations

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        cache, (seat, num_tokens) = self._cache, self.rows[row]
        number = cache.memory.group_by_layer[layer_idx]
        group, kept = cache.groups[number], seat.groups[number]
        end = seat.length + num_tokens
        new = torch.arange(seat.boundary, end)
        at = group.layers.index(layer_idx)
        heads = [
            torch.cat((kept.positions[at, head, : kept.counts[head if group.split_heads else 0]].cpu(), new))
            for head in range(group.num_heads)
        ]
        window = end if group.window is None else group.window
        seen = [positions >= end - window for positions in heads]
        most = max(int(each.sum()) for each in seen)
        positions, indices = torch.full((2, most, group.num_heads), -1)
        for head, (of_head, is_seen) in enumerate(zip(heads, seen, strict=True)):
            count = int(is_seen.sum())
            positions[:count, head], indices[:count, head] = of_head[is_seen], is_seen.nonzero()[:, 0]
        store, slots, _ = self._locations[layer_idx]
        indices = indices.clamp_min(0).to(store.device)  # of what only fills up
        wanted = indices if group.split_heads else indices[:, 0].contiguous()
        k, v = cache.setup.ops.gather(store, layer_idx, slots, row, wanted)
        return k, v, positions.to(store.device)


class CompressedCache(KVCache[CompressedSeat]):
    """A cache that keeps a budget of keys in each KV head, those that its scorer ranks highest."""

    options: CompressedOptions
    options_type = CompressedOptions

    def __init__(self, setup: CacheSetup, options: CompressedOptions) -> None:
        super().__init__(setup, options)
        geometry, arena = setup.geometry, setup.arena
        scorer = make_scorer(setup.name, options, geometry.layers)
        self.budgets = Budgets(options, geometry)
        self.memory = CompressedMemory(setup, options, self.budgets)
        self.groups, self.stores = self.memory.groups, self.memory.stores
        dtype, device = self.memory.dtype, arena.memory.device
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, dtype)
        self._q_start = torch.zeros(geometry.max_seats + 1, dtype=torch.int32, device=device)
        self.queries = self._make_query_buffer(scorer.num_queries, geometry)
        self._compactor = Compactor(setup, options, self.memory, self.budgets, scorer, self.queries)
        self._scores_always = scorer.num_queries is None
        self._free = list(range(geometry.max_seats))[::-1]
        self._seats: set[CompressedSeat] = set()
        keeps_all = isinstance(options.budget, int) and options.budget >= geometry.max_seq_len
        self.contract = Contract(
            exact=keeps_all and options.by_layer == "uniform" and dtype is geometry.kv_dtype,
            forkable=True,
            rewind=0,
            replayable=True,
            chunk_invariant=True,
            max_row=options.every,
        )

    def _make_query_buffer(self, num_queries: int | None, geometry: Geometry) -> QueryBuffer | None:
        every = self.options.every
        layers = [i for i, spec in enumerate(geometry.layers) if spec.window is None]
        if num_queries == 0 or not layers:
            return None
        store = self.stores[self.memory.group_by_layer[layers[0]]]
        count = every if num_queries is None else num_queries
        return QueryBuffer(self.name, geometry.layers, layers, count, every, store, geometry.kv_dtype)

    # ---------------------------------------------------------------- memory
    @classmethod
    def seat_shape(cls, options: CompressedOptions, geometry: Geometry) -> SeatShape:
        sizes = list_block_bytes(options, geometry)
        smallest = min(sizes)
        blocks = sum(
            count * -(-size // smallest)
            for size, count in zip(sizes, count_peak_blocks(options, geometry, geometry.max_seq_len), strict=True)
        )
        return SeatShape(smallest, blocks + count_query_blocks(options, geometry, sizes))

    def bytes_for(self, num_tokens: int) -> int:
        pages = [store.pages_per_block for store in self.stores]
        peak = count_peak_blocks(self.options, self.setup.geometry, num_tokens)
        total = sum(count * run for count, run in zip(peak, pages, strict=True))
        if self.queries is not None and num_tokens > self.queries.first_stored(self.options.every):
            total += self.queries.num_blocks * self._query_store.pages_per_block
        return total * self.setup.arena.page_bytes

    @property
    def _query_store(self) -> KVStore:
        assert self.queries is not None
        return self.stores[self.memory.group_by_layer[self.queries.layers[0]]]

    # ---------------------------------------------------------------- seats
    def open(
        self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
    ) -> CompressedSeat | None:
        if not self._free:
            return None
        groups = [KeptTokens(len(group.layers), group.num_heads, group.num_columns) for group in self.groups]
        device = self.setup.arena.memory.device
        for kept in groups:
            kept.positions = kept.positions.to(device)
        seat = CompressedSeat(self._free.pop(), groups)
        self._seats.add(seat)
        return seat

    def row_limit(self, seat: CompressedSeat) -> int:
        return self.options.every - seat.length % self.options.every

    def grow(self, seat: CompressedSeat, num_tokens: int) -> bool:
        assert num_tokens <= self.row_limit(seat), "a row must end at a boundary"
        end = seat.length + num_tokens
        is_boundary = end % self.options.every == 0
        for number, (group, kept) in enumerate(zip(self.groups, seat.groups, strict=True)):
            for column, count in enumerate(kept.counts):
                if not self.memory.extend(number, kept.blocks[column], count + end - seat.boundary):
                    return False
            self.memory.tables[number].write(seat, number)
            spare = self._count_spare(group, kept, seat, end) if is_boundary else 0
            if not self.memory.extend(number, kept.spare, spare * self.memory.block_size):
                return False
        return self._grow_queries(seat, end)

    def _count_spare(self, group: AddressGroup, kept: KeptTokens, seat: CompressedSeat, end: int) -> int:
        """Return how many blocks a compaction at position `end` moves to; 0 if nothing is dropped there."""
        budget = self.budgets.count_kept(group.layers[0], end)
        held = sum(kept.counts) + (end - seat.boundary) * len(kept.counts)
        if held <= budget * group.num_columns:
            return 0
        return count_column_blocks(budget, group, self.memory.block_size)

    def _grow_queries(self, seat: CompressedSeat, end: int) -> bool:
        """Allocate blocks for the queries before the next boundary, if the row has some and they are looked at."""
        buffer, every = self.queries, self.options.every
        if buffer is None or seat.query_blocks:
            return True
        boundary = -(-end // every) * every
        if end <= buffer.first_stored(boundary) or not self._is_scored_at(boundary):
            return True
        number = self.memory.group_by_layer[buffer.layers[0]]
        blocks = self.memory.allocate(number, buffer.num_blocks)
        seat.query_blocks = blocks or []
        return blocks is not None

    def _is_scored_at(self, boundary: int) -> bool:
        """Return whether a scorer ranks keys at a boundary."""
        if self._scores_always:
            return True
        before, full = boundary - self.options.every, [g for g in self.groups if g.window is None]
        return any(
            self.budgets.count_kept(group.layers[0], before) + self.options.every
            > self.budgets.count_kept(group.layers[0], boundary)
            for group in full
        )

    def crop(self, seat: CompressedSeat, length: int) -> None:
        assert length == seat.length, "more than contract.rewind"

    def fork(self, seat: CompressedSeat) -> CompressedSeat | None:
        child = self.open(())
        if child is None:
            return None
        child.length, child.cached, child.boundary, child.states = seat.length, seat.cached, seat.boundary, seat.states
        for number, (ours, theirs) in enumerate(zip(child.groups, seat.groups, strict=True)):
            ours.counts, ours.positions = list(theirs.counts), theirs.positions
            for own, blocks, count in zip(ours.blocks, theirs.blocks, theirs.counts, strict=True):
                if not self.memory.extend(number, own, count + seat.num_new):
                    self.close(child)
                    return None
                self.setup.ops.copy_blocks(self.stores[number], blocks[: len(own)], own)
        if seat.query_blocks:
            number = self.memory.group_by_layer[self.queries.layers[0]] if self.queries is not None else 0
            copies = self.memory.allocate(number, len(seat.query_blocks))
            if copies is None:
                self.close(child)
                return None
            child.query_blocks = copies
            self.setup.ops.copy_blocks(self.stores[number], seat.query_blocks, copies)
        return child

    def close(self, seat: CompressedSeat) -> None:
        for number, kept in enumerate(seat.groups):
            self.memory.release(number, [*kept.spare, *(block for blocks in kept.blocks for block in blocks)])
        self._release_queries(seat)
        self._seats.remove(seat)
        self._free.append(seat.index)

    def _release_queries(self, seat: CompressedSeat) -> None:
        if seat.query_blocks and self.queries is not None:
            self.memory.release(self.memory.group_by_layer[self.queries.layers[0]], seat.query_blocks)
            seat.query_blocks = []

    # ---------------------------------------------------------------- steps
    def fill_q_start(self, rows: Sequence[Row[CompressedSeat]]) -> Tensor:
        """Return the index of each row's first token, in memory that stays at its address."""
        q_start = self._q_start[: len(rows) + 1]
        q_start.copy_(torch.tensor(list(accumulate((row.num_tokens for row in rows), initial=0)), dtype=torch.int32))
        return q_start

    def plan(self, rows: Sequence[Row[CompressedSeat]]) -> CompressedPlan:
        return CompressedPlan(self, rows)

    def commit(self, plan: Plan[CompressedSeat], tokens: Sequence[Sequence[int]]) -> None:
        for (seat, num_tokens), ids in zip(plan.rows, tokens, strict=True):
            assert len(ids) <= num_tokens
            seat.length += len(ids)
        assert isinstance(plan, CompressedPlan)
        if plan.tapped is not None and self.queries is not None:
            _, tapped, scratch = plan.tapped
            for row in tapped:
                self.queries.store(row, scratch)

    def compact(self, seat: CompressedSeat) -> None:
        if seat.length % self.options.every or seat.length == seat.boundary:
            return
        self._compactor.compact(seat)
        self._release_queries(seat)

    # ---------------------------------------------------------------- reports
    def _iter_held(self, seat: CompressedSeat) -> Iterator[tuple[int, list[int], int]]:
        """Yield (group, blocks, number of keys in them) of a seat, by column."""
        for number, kept in enumerate(seat.groups):
            for blocks, count in zip(kept.blocks, kept.counts, strict=True):
                yield number, blocks, count + seat.num_new

    def count_dropped_tokens(self, seat: CompressedSeat) -> int:
        kept = total = 0
        for group, of_group in zip(self.groups, seat.groups, strict=True):
            heads = len(group.layers) * group.num_heads
            used = seat.length if group.window is None else min(seat.length, group.window - 1)
            counts = [min(used, count + seat.num_new) for count in of_group.counts]
            kept += sum(counts) * heads // len(counts)
            total += used * heads
        return (total - kept) // sum(len(group.layers) * group.num_heads for group in self.groups)

    def usage(self) -> CacheUsage:
        page = self.setup.arena.page_bytes
        reserved = used = 0.0
        for seat in self._seats:
            for number, blocks, count in self._iter_held(seat):
                store = self.stores[number]
                reserved += len(blocks) * store.pages_per_block * page
                used += count * store.block_bytes / self.memory.block_size
            for number, kept in enumerate(seat.groups):
                reserved += len(kept.spare) * self.stores[number].pages_per_block * page
            if seat.query_blocks:
                size = len(seat.query_blocks) * self._query_store.pages_per_block * page
                reserved, used = reserved + size, used + size
        tokens = sum(seat.length for seat in self._seats)
        return CacheUsage(
            len(self._seats), tokens, int(reserved), int(used), 0, int(reserved) - int(used), self.limit_bytes
        )

    def blocks(self) -> Blocks:
        return Blocks(in_use=sum(len(blocks) for seat in self._seats for _, blocks, _ in self._iter_held(seat)))

    def check_integrity(self) -> None:
        held: list[int] = []
        for seat in self._seats:
            assert seat.boundary <= seat.length < seat.boundary + self.options.every
            lists = [(number, blocks) for number, blocks, _ in self._iter_held(seat)]
            lists += [(number, kept.spare) for number, kept in enumerate(seat.groups)]
            lists += [
                (0 if self.queries is None else self.memory.group_by_layer[self.queries.layers[0]], seat.query_blocks)
            ]
            for number, blocks in lists:
                held += [page + i for page in blocks for i in range(self.stores[number].pages_per_block)]
            for number, blocks, count in self._iter_held(seat):
                assert count <= len(blocks) * self.memory.block_size, number
            for kept in seat.groups:
                assert bool((kept.positions.diff(dim=2) > 0).logical_or(kept.positions[:, :, 1:] < 0).all())
                assert kept.positions.numel() == 0 or int(kept.positions.max()) < seat.boundary
        assert len(held) == len(set(held)) == self.setup.arena.num_held_pages(self.name)
