"""compressed: a KV cache that keeps the keys a scorer ranks highest, and frees the memory of all others.

A text has a boundary at every multiple of `every`, and rows end there. When a sequence has reached one, its scorer
ranks the keys that it holds; the best stay, in order, and are moved to its first slots (compaction.py). Between
boundaries all new keys are kept. So what is kept, and all that is computed from it, does not depend on how a text was
cut into rows, and a sequence that is computed again keeps the same keys.

Addresses count kept keys. RoPE stays as it was computed. Sequences share nothing: each compaction rewrites what a
sequence keeps, so a fork is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, Options, Plan, Row
from cache_strategies.compressed.compaction import Compactor
from cache_strategies.compressed.memory import CompressedMemory, count_peak_blocks, list_block_bytes
from cache_strategies.compressed.options import Budgets, CompressedOptions, make_scorer
from cache_strategies.compressed.queries import QueryBuffer, compute_query_bytes, find_query_shape
from cache_strategies.compressed.seat import CompressedSeat, KeptTokens
from cache_strategies.scorers.base import Scorer
from cache_strategies.types import NO_SALT, Blocks, CacheUsage, Contract, Geometry, Salt, Sizes
from config.errors import SettingsError
from kernels.ops import KVLocation


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
    options_type: ClassVar[type[Options]] = CompressedOptions

    def __init__(self, setup: CacheSetup, options: CompressedOptions) -> None:
        super().__init__(setup, options)
        geometry = setup.geometry
        scorer = make_scorer(setup.name, options, geometry.layers)
        self.budgets = Budgets(options, geometry)
        self.memory = CompressedMemory(setup, options, self.budgets)
        self.groups, self.stores = self.memory.groups, self.memory.stores
        dtype, device = self.memory.dtype, setup.memory.device
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, dtype)
        self._q_start = torch.zeros(geometry.max_seats + 1, dtype=torch.int32, device=device)
        self.queries = self._make_query_buffer(scorer.num_queries, geometry)
        self._compactor = self.make_compactor(scorer)
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

    def make_compactor(self, scorer: Scorer) -> Compactor:
        return Compactor(self.setup, self.options, self.memory, self.budgets, scorer, self.queries)

    def _make_query_buffer(self, num_queries: int | None, geometry: Geometry) -> QueryBuffer | None:
        try:
            shape = find_query_shape(self.options, geometry, num_queries)
        except SettingsError as error:
            raise SettingsError(f"strategies.{self.name}: {error}") from None
        if shape is None:
            return None
        return QueryBuffer(shape, geometry.layers, self.options.every, self.setup.memory, geometry.kv_dtype)

    # ---------------------------------------------------------------- memory
    @classmethod
    def sizes(cls, options: CompressedOptions, geometry: Geometry) -> Sizes:
        keys, queries = list_block_bytes(options, geometry), compute_query_bytes(options, geometry)
        if not queries:
            return Sizes(keys, lambda num_tokens: count_peak_blocks(options, geometry, num_tokens))
        return Sizes([*keys, queries], lambda num_tokens: [*count_peak_blocks(options, geometry, num_tokens), 1])

    # ---------------------------------------------------------------- seats
    def open(
        self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
    ) -> CompressedSeat | None:
        if not self._free:
            return None
        device = self.setup.memory.device
        groups = [KeptTokens(len(group.layers), group.num_heads, group.num_columns, device) for group in self.groups]
        seat = self._make_seat(self._free.pop(), groups)
        self._seats.add(seat)
        return seat

    def _make_seat(self, index: int, groups: list[KeptTokens]) -> CompressedSeat:
        return CompressedSeat(index, groups)

    def row_limit(self, seat: CompressedSeat) -> int:
        return self.options.every - seat.length % self.options.every

    def grow(self, seat: CompressedSeat, num_tokens: int) -> bool:
        assert num_tokens <= self.row_limit(seat), "a row must end at a boundary"
        end = seat.length + num_tokens
        for number, kept in enumerate(seat.groups):
            for column, count in enumerate(kept.counts):
                if not self.memory.extend(seat, number, column, count + end - seat.boundary):
                    return False
        return self._grow_queries(seat, end)

    def _grow_queries(self, seat: CompressedSeat, end: int) -> bool:
        """Allocate blocks for the queries before the next boundary, if the row has some and they are looked at."""
        buffer, every = self.queries, self.options.every
        if buffer is None or seat.query_block is not None:
            return True
        boundary = -(-end // every) * every
        if end <= buffer.first_stored(boundary) or not self._is_scored_at(boundary):
            return True
        return buffer.allocate(seat)

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

    def fork(self, seat: CompressedSeat) -> CompressedSeat | None:
        child = self.open(())
        if child is None:
            return None
        child.length, child.cached, child.boundary = seat.length, seat.cached, seat.boundary
        child.states, child.state_bytes = seat.states, seat.state_bytes
        for ours, theirs in zip(child.groups, seat.groups, strict=True):
            ours.counts, ours.positions = list(theirs.counts), theirs.positions
        if not self._copy_blocks(seat, child):
            self.close(child)
            return None
        return child

    def _copy_blocks(self, seat: CompressedSeat, child: CompressedSeat) -> bool:
        """Copy the keys, values and queries of a seat for its fork; return False if there is not enough memory."""
        for number, (ours, theirs) in enumerate(zip(child.groups, seat.groups, strict=True)):
            for column, (own, blocks) in enumerate(zip(ours.blocks, theirs.blocks, strict=True)):
                if not self.memory.extend(child, number, column, theirs.counts[column] + seat.num_new):
                    return False
                self.memory.copy_blocks(number, blocks[: len(own)], own)
        return self.queries is None or self.queries.copy(seat, child)

    def close(self, seat: CompressedSeat) -> None:
        for number, kept in enumerate(seat.groups):
            self.memory.release(number, [block for blocks in kept.blocks for block in blocks])
        if self.queries is not None:
            self.queries.release(seat)
        self._seats.remove(seat)
        self._free.append(seat.index)

    # ---------------------------------------------------------------- steps
    def fill_q_start(self, rows: Sequence[Row[CompressedSeat]]) -> Tensor:
        """Return the index of each row's first token, in memory that stays at its address."""
        q_start = self._q_start[: len(rows) + 1]
        q_start.copy_(torch.tensor(list(accumulate((row.num_tokens for row in rows), initial=0)), dtype=torch.int32))
        return q_start

    def plan(self, rows: Sequence[Row[CompressedSeat]]) -> CompressedPlan:
        return CompressedPlan(self, rows)

    def commit(self, plan: Plan[CompressedSeat], tokens: Sequence[Sequence[int]]) -> None:
        super().commit(plan, tokens)
        assert isinstance(plan, CompressedPlan)
        if plan.tapped is not None and self.queries is not None:
            _, tapped, scratch = plan.tapped
            for row in tapped:
                self.queries.store(row, scratch)

    def compact(self, seat: CompressedSeat) -> int | None:
        if seat.length % self.options.every or seat.length == seat.boundary:
            return None
        before = self.count_dropped_tokens(seat)
        exceeds = self._compactor.compact(seat)
        if self.queries is not None:
            self.queries.release(seat)
        return self.count_dropped_tokens(seat) - before if exceeds else None

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

    def token_budget(self, length: int) -> int:
        kept = heads = 0
        for group in self.groups:
            count = len(group.layers) * group.num_heads
            kept += count * (length if group.window is not None else self.budgets.count_kept(group.layers[0], length))
            heads += count
        return -(-kept // heads)

    def usage(self) -> CacheUsage:
        reserved = used = 0.0
        for seat in self._seats:
            for number, blocks, count in self._iter_held(seat):
                reserved += self.memory.count_bytes(number, len(blocks))
                used += count * self.stores[number].block_bytes / self.memory.block_size
            if self.queries is not None:
                size = 0 if seat.query_block is None else self.queries.region.size
                reserved, used = reserved + size, used + size
        tokens = sum(seat.length for seat in self._seats)
        outside = {id(seat.states): seat.state_bytes for seat in self._seats}  # those that forks share count once
        return CacheUsage(
            len(self._seats),
            tokens,
            int(reserved),
            int(used),
            idle=0,
            wasted=int(reserved) - int(used),
            limit=self.setup.memory.limit_bytes,
            outside=sum(outside.values()),
        )

    def blocks(self) -> Blocks:
        return Blocks(in_use=sum(len(blocks) for seat in self._seats for _, blocks, _ in self._iter_held(seat)))

    def check_integrity(self) -> None:
        held: list[list[int]] = [[] for _ in self.groups]
        for seat in self._seats:
            assert seat.boundary <= seat.length < seat.boundary + self.options.every
            for number, blocks, count in self._iter_held(seat):
                held[number] += blocks
                assert count <= len(blocks) * self.memory.block_size, number
            for kept in seat.groups:
                assert bool((kept.positions.diff(dim=2) > 0).logical_or(kept.positions[:, :, 1:] < 0).all())
                assert kept.positions.numel() == 0 or int(kept.positions.max()) < seat.boundary
        for blocks, region in zip(held, self.memory.regions, strict=True):
            assert len(blocks) == len(set(blocks)) == region.num_held
        if self.queries is not None:
            queries = [seat.query_block for seat in self._seats if seat.query_block is not None]
            assert len(queries) == len(set(queries)) == self.queries.region.num_held
