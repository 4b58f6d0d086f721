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
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, Locations, Options, Rows
from cache_strategies.compressed.compaction import Compactor
from cache_strategies.compressed.memory import CompressedLayout, CompressedMemory
from cache_strategies.compressed.options import CompressedOptions, make_scorer
from cache_strategies.compressed.queries import QueryBuffer, compute_query_bytes, find_query_shape
from cache_strategies.compressed.state import CompressedState, KeptTokens
from cache_strategies.scorers.base import Scorer
from cache_strategies.types import Blocks, CacheUsage, Contract, Geometry, Sizes, Text
from config.errors import SettingsError
from kernels.ops import KVLocation


class CompressedSequence(CompressedState):
    """A sequence of a compressed cache."""

    def __init__(self, cache: CompressedCache, index: int, groups: list[KeptTokens]) -> None:
        super().__init__(index, groups)
        self.cache = cache
        self.stop = cache.options.every

    def reserve(self, num_tokens: int) -> bool:
        cache, end = self.cache, self.length + num_tokens
        assert self.stop is not None
        assert end <= self.stop, "a row must end at `stop`"
        for number, kept in enumerate(self.groups):
            for column, count in enumerate(kept.counts):
                if not cache.memory.extend(self, number, column, count + end - self.boundary):
                    return False
        return cache.reserve_queries(self, end)

    def commit(self, ids: Sequence[int]) -> None:
        self.length += len(ids)
        every = self.cache.options.every
        self.stop = (self.length // every + 1) * every
        if self.tapped is not None and self.cache.queries is not None:
            self.cache.queries.store(self, self.tapped)

    def compact(self) -> bool:
        if self.length % self.cache.options.every or self.length == self.boundary:
            return False
        has_dropped = self.cache.compactor.compact(self)
        if self.cache.queries is not None:
            self.cache.queries.release(self)
        return has_dropped

    def truncate(self, length: int) -> None:
        assert length == self.length, "contract.rewind is 0"

    def fork(self) -> Self | None:
        child = self.cache.open(Text(()))
        if child is None:
            return None
        child.length, child.found, child.boundary = self.length, self.found, self.boundary
        child.stop, child.shift = self.stop, self.shift
        child.states, child.state_bytes = self.states, self.state_bytes
        for ours, theirs in zip(child.groups, self.groups, strict=True):
            ours.counts, ours.positions = list(theirs.counts), theirs.positions
        if not self._copy_blocks(child):
            child.close()
            return None
        assert isinstance(child, type(self))
        return child

    def _copy_blocks(self, child: CompressedSequence) -> bool:
        """Copy the keys, values and queries for a fork; return False if there is not enough memory."""
        memory, queries = self.cache.memory, self.cache.queries
        for number, (ours, theirs) in enumerate(zip(child.groups, self.groups, strict=True)):
            for column, (own, blocks) in enumerate(zip(ours.blocks, theirs.blocks, strict=True)):
                if not memory.extend(child, number, column, theirs.counts[column] + self.num_new):
                    return False
                memory.copy_blocks(number, blocks[: len(own)], own)
        return queries is None or queries.copy(self, child)

    def close(self) -> None:
        for number, kept in enumerate(self.groups):
            self.cache.memory.release(number, [block for blocks in kept.blocks for block in blocks])
        if self.cache.queries is not None:
            self.cache.queries.release(self)
        self.cache.remove(self)


class CompressedCache(KVCache[CompressedSequence]):
    """A cache that keeps a budget of keys in each KV head, those that its scorer ranks highest."""

    options: CompressedOptions
    options_type: ClassVar[type[Options]] = CompressedOptions
    sequence_type: ClassVar[type[CompressedSequence]] = CompressedSequence

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        self.layout = self.make_layout(options, setup.geometry)
        super().__init__(setup, self.layout.options)
        geometry, options = setup.geometry, self.options
        scorer = make_scorer(setup.name, options, geometry.layers)
        self.memory = CompressedMemory(setup, self.layout)
        self.groups, self.stores = self.memory.groups, self.memory.stores
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, self.memory.formats)
        self.queries = self._make_query_buffer(scorer.num_queries)
        self.compactor = self.make_compactor(scorer)
        self._scores_always = scorer.num_queries is None
        self._free = list(range(geometry.max_seats))[::-1]
        self._sequences: set[CompressedSequence] = set()
        self._located: Sequence[KVLocation] = ()  # of the latest step, by layer
        keeps_all = isinstance(options.budget, int) and options.budget >= geometry.max_seq_len
        exact = keeps_all and options.by_layer == "uniform" and not self.memory.formats.are_quantized
        self.contract = Contract(exact=exact, rewind=0)

    @classmethod
    def make_layout(cls, options: Any, geometry: Geometry) -> CompressedLayout:
        """Return how the layers of a model are divided."""
        return CompressedLayout(options, geometry, [spec.window for spec in geometry.layers])

    def make_compactor(self, scorer: Scorer) -> Compactor:
        return Compactor(self.setup, self.options, self.memory, self.layout.budgets, scorer, self.queries)

    def _make_query_buffer(self, num_queries: int | None) -> QueryBuffer | None:
        try:
            shape = find_query_shape(self.layout, num_queries)
        except SettingsError as error:
            raise SettingsError(f"strategies.{self.name}: {error}") from None
        return None if shape is None else QueryBuffer(shape, self.layout, self.setup.memory)

    # ---------------------------------------------------------------- memory
    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        layout = cls.make_layout(options, geometry)
        keys, queries = layout.list_block_bytes(), compute_query_bytes(layout)
        if not queries:
            return Sizes(keys, layout.count_peak_blocks)
        return Sizes([*keys, queries], lambda num_tokens: [*layout.count_peak_blocks(num_tokens), 1])

    def reserve_queries(self, sequence: CompressedState, end: int) -> bool:
        """Allocate a block for the queries before the next boundary, if the row has some and they are looked at."""
        buffer, every = self.queries, self.options.every
        if buffer is None or sequence.query_block is not None:
            return True
        boundary = -(-end // every) * every
        if end <= buffer.first_stored(boundary) or not self._is_scored_at(boundary):
            return True
        return buffer.allocate(sequence)

    def _is_scored_at(self, boundary: int) -> bool:
        """Return whether a scorer ranks keys at a boundary."""
        if self._scores_always:
            return True
        before, full = boundary - self.options.every, [g for g in self.groups if g.window is None]
        count_kept = self.layout.budgets.count_kept
        return any(
            count_kept(group.layers[0], before) + self.options.every > count_kept(group.layers[0], boundary)
            for group in full
        )

    # ---------------------------------------------------------------- sequences and steps
    def open(self, text: Text) -> CompressedSequence | None:
        if not self._free:
            return None
        device = self.setup.memory.device
        groups = [KeptTokens(len(group.layers), group.num_heads, group.num_columns, device) for group in self.groups]
        opened = self.sequence_type(self, self._free.pop(), groups)
        self._sequences.add(opened)
        return opened

    def remove(self, sequence: CompressedSequence) -> None:
        """Forget a sequence, whose memory is free."""
        self._sequences.remove(sequence)
        self._free.append(sequence.index)

    def locate(self, rows: Rows[CompressedSequence]) -> Locations:
        q_start = self.memory.table.make_q_start(rows)
        locations = []
        for number, (store, table) in enumerate(zip(self.stores, self.memory.tables, strict=True)):
            kept = [[count + each.num_new for count in each.groups[number].counts] for each in rows.sequences]
            locations.append(KVLocation(store, table.make_slots(rows, kept, q_start), None))
        self._located = [locations[number] for number in self.memory.group_by_layer]
        return Locations(self._located, None if self.queries is None else self.queries.make_tap(rows))

    def gather(self, layer: int, rows: Rows[CompressedSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        sequence, number = rows.sequences[row], self.memory.group_by_layer[layer]
        group, kept = self.groups[number], sequence.groups[number]
        end = rows.end(row)
        new = torch.arange(sequence.boundary, end)
        at = group.layers.index(layer)
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
        store, slots, _ = self._located[layer]
        indices = indices.clamp_min(0).to(store.device)  # of what only fills up
        wanted = indices if group.split_heads else indices[:, 0].contiguous()
        k, v = self.setup.ops.gather(store, layer, slots, row, wanted)
        return k, v, positions.to(store.device)

    # ---------------------------------------------------------------- reports
    def _iter_held(self, sequence: CompressedSequence) -> Iterator[tuple[int, list[int], int]]:
        """Yield (group, blocks, number of keys in them) of a sequence, by column."""
        for number, kept in enumerate(sequence.groups):
            for blocks, count in zip(kept.blocks, kept.counts, strict=True):
                yield number, blocks, count + sequence.num_new

    def count_visible(self, layer: int, length: int) -> int | None:
        group = self.groups[self.memory.group_by_layer[layer]]
        if group.window is not None:
            return None
        boundary = length - length % self.options.every
        return self.layout.budgets.count_kept(layer, boundary) + length - boundary

    def budget(self, length: int) -> int | None:
        kept = heads = 0
        for group in self.groups:
            count = len(group.layers) * group.num_heads
            is_full = group.window is not None
            kept += count * (length if is_full else self.layout.budgets.count_kept(group.layers[0], length))
            heads += count
        return -(-kept // heads)

    def usage(self) -> CacheUsage:
        reserved = used = 0.0
        for sequence in self._sequences:
            for number, blocks, count in self._iter_held(sequence):
                reserved += len(blocks) * self.memory.regions[number].size
                used += count * self.stores[number].block_bytes / self.memory.block_size
            if self.queries is not None:
                size = 0 if sequence.query_block is None else self.queries.region.size
                reserved, used = reserved + size, used + size
        tokens = sum(sequence.length for sequence in self._sequences)
        # States that forks share count once
        outside = {id(sequence.states): sequence.state_bytes for sequence in self._sequences}
        return CacheUsage(
            len(self._sequences),
            tokens,
            int(reserved),
            int(used),
            idle=0,
            wasted=int(reserved) - int(used),
            limit=self.setup.memory.limit_bytes,
            outside=sum(outside.values()),
        )

    def blocks(self) -> Blocks:
        return Blocks(
            in_use=sum(len(blocks) for sequence in self._sequences for _, blocks, _ in self._iter_held(sequence))
        )

    def check_integrity(self) -> None:
        held: list[list[int]] = [[] for _ in self.groups]
        for sequence in self._sequences:
            assert sequence.boundary <= sequence.length < sequence.boundary + self.options.every
            for number, blocks, count in self._iter_held(sequence):
                held[number] += blocks
                assert count <= len(blocks) * self.memory.block_size, number
            for kept in sequence.groups:
                assert bool((kept.positions.diff(dim=2) > 0).logical_or(kept.positions[:, :, 1:] < 0).all())
                assert kept.positions.numel() == 0 or int(kept.positions.max()) < sequence.boundary
        for blocks, region in zip(held, self.memory.regions, strict=True):
            assert len(blocks) == len(set(blocks)) == region.num_held
        if self.queries is not None:
            queries = [sequence.query_block for sequence in self._sequences if sequence.query_block is not None]
            assert len(queries) == len(set(queries)) == self.queries.region.num_held
