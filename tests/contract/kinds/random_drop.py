"""random_drop and random_drop_by_head: strategies that drop keys at random, and count addresses in kept tokens.

The text has a boundary at every multiple of `every`. As soon as a sequence has reached one, a random part of the tokens
before it is dropped. What is drawn depends on the boundary, the layer and, in random_drop_by_head, the KV head:
so all that a sequence keeps follows from its length, in whatever rows its tokens came.

A row may cross a boundary, as sequences set no `stop`. Tokens are dropped in commit(), so the queries behind the
boundary still see the keys of their row's beginning: attention depends on the rows (chunk_invariant is False), and with
it do the keys of the next layer, so that a sequence that is computed again may differ (replayable is False).

Each layer, or each KV head of a layer, has a `KeptTokens` with blocks of its own. Kept keys are moved to fresh blocks,
never within a block, as forks share full blocks. reserve() allocates the blocks to move to, as commit() must not fail.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Rows
from cache_strategies.block_table import TableOptions, resolve_kv_formats
from cache_strategies.types import Blocks, CacheUsage, Contract, Geometry, Sizes, Text
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.contract.kinds.hooked import make_tap_of_last_tokens


# -------------------------------------------------------------------- which tokens are dropped
def choose_survivors(boundary: int, layer: int, head: int, kept: Sequence[int]) -> list[int]:
    """Return those of the `kept` positions that are still kept when a sequence reaches a boundary."""
    rng = random.Random(f"{boundary} {layer} {head}")
    before = [position for position in kept if position < boundary]
    return sorted(rng.sample(before, rng.randint(len(before) // 4, len(before)))) + list(kept[len(before) :])


def list_kept(length: int, every: int, layer: int, head: int = 0) -> list[int]:
    """Return the positions that are kept of the first `length` tokens, by the definition."""
    kept = list(range(length))
    for boundary in range(every, length + 1, every):
        kept = choose_survivors(boundary, layer, head, kept)
    return kept


class DropOptions(TableOptions):
    """Options of a RandomDropCache."""

    every: int = Field(8, ge=1, description="number of tokens from one boundary to the next")
    block_size: int = Field(4, ge=1, le=1024, description="tokens in a block")


# -------------------------------------------------------------------- a sequence
@dataclass
class KeptTokens:
    """What one layer, or one KV head of it, keeps of a sequence."""

    table_row: int
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)  # to which the tokens are moved if the next commit drops some


@dataclass(eq=False)
class Entered:
    """A committed token; forks have the same objects."""

    id: int


class DropSequence(KVSequence):
    """A sequence, its tokens, and what is kept of them: by layer, one KeptTokens or one for each KV head."""

    def __init__(self, cache: RandomDropCache, index: int, layers: Sequence[Sequence[KeptTokens]]) -> None:
        self.miss = "bypass"
        self.index = index
        self.entered: list[Entered] = []
        self.layers = layers
        self._cache = cache

    @property
    def parts(self) -> Iterator[KeptTokens]:
        """The KeptTokens of all layers, one after the other."""
        return (part for layer in self.layers for part in layer)

    def list_positions(self, layer: int, end: int) -> list[list[int]]:
        """Return, for each part of a layer, the positions that it keeps with those of new tokens up to `end`."""
        return [[*part.positions, *range(self.length, end)] for part in self.layers[layer]]

    def reserve(self, num_tokens: int) -> bool:
        cache = self._cache
        drops = (self.length + num_tokens) // cache.every > self.length // cache.every
        lacking: list[tuple[list[int], int]] = []
        for part in self.parts:
            total = -(-(len(part.positions) + num_tokens) // cache.block_size)
            lacking += [(part.blocks, total - len(part.blocks)), (part.spare, drops * total - len(part.spare))]
        blocks = cache.allocate(sum(max(0, count) for _, count in lacking))
        if blocks is None:
            return False
        for target, count in lacking:
            target += [blocks.pop() for _ in range(count)]
        return True

    def commit(self, ids: Sequence[int]) -> None:
        cache, start = self._cache, self.length
        self.length += len(ids)
        self.entered += map(Entered, ids)
        boundaries = [at for at in range(start + 1, self.length + 1) if at % cache.every == 0]
        for layer, parts in enumerate(self.layers):
            for head, part in enumerate(parts):
                part.positions += range(start, self.length)
                kept = part.positions
                for boundary in boundaries:
                    kept = choose_survivors(boundary, layer, head, kept)
                if kept != part.positions:
                    cache.move(layer, part, kept)
                cache.release(part.spare)

    def truncate(self, length: int) -> None:
        assert length == self.length, "more than contract.rewind"

    def fork(self) -> DropSequence | None:
        cache, size = self._cache, self._cache.block_size
        child = cache.open(Text(()))
        if child is None:
            return None
        ends = [layer for layer, parts in enumerate(self.layers) for p in parts if len(p.positions) % size]
        copies = cache.allocate(len(ends))
        if copies is None:
            child.close()
            return None
        child.length, child.found, child.entered = self.length, self.found, list(self.entered)
        for layer, (ours, theirs) in enumerate(zip(child.layers, self.layers, strict=True)):
            for part, parent in zip(ours, theirs, strict=True):
                full, rest = divmod(len(parent.positions), size)
                part.positions, part.blocks = list(parent.positions), parent.blocks[:full]
                cache.references.update(part.blocks)
                if rest:
                    part.blocks.append(copies.pop())
                    cache.setup.ops.copy_blocks(cache.stores[layer], [parent.blocks[full]], [part.blocks[full]])
        return child

    def close(self) -> None:
        for part in self.parts:
            self._cache.release(part.blocks)
            self._cache.release(part.spare)
        self._cache.remove(self)


def _iter_window_starts(rows: Rows[DropSequence], layer: int, window: int) -> Iterator[list[int]]:
    """Yield for each token of a step the index of the oldest token in its window, in each part of the layer."""
    for row, sequence in enumerate(rows.sequences):
        kept = sequence.list_positions(layer, rows.end(row))
        for position in range(sequence.length, rows.end(row)):
            yield [bisect_right(positions, position - window) for positions in kept]


# -------------------------------------------------------------------- the cache
class RandomDropCache(KVCache[DropSequence]):
    """A cache that keeps a random part of a sequence's tokens, the same in all KV heads of a layer."""

    interface_version = 3
    options_type = DropOptions
    split_heads = False

    def __init__(self, setup: CacheSetup, options: DropOptions) -> None:
        super().__init__(setup, options)
        geometry, device = setup.geometry, setup.memory.device
        self.every, self.block_size = options.every, options.block_size
        formats = resolve_kv_formats(options, geometry)
        # Blocks of all layers lie in one region, and have the size of the largest
        self._region = setup.memory.region(self._compute_block_bytes(options, geometry))
        self.stores = [
            KVStore(self._region, {i: spec}, self.block_size, formats, split_heads=self.split_heads)
            for i, spec in enumerate(geometry.layers)
        ]
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, formats)
        self._heads = [self._count_parts(spec) for spec in geometry.layers]
        width = -(-geometry.max_seq_len // self.block_size)
        self.tables = [
            torch.zeros(geometry.max_seats * heads, width, dtype=torch.int32, device=device) for heads in self._heads
        ]
        self._arrays = self._make_arrays(geometry, device)
        self._free = list(range(geometry.max_seats))
        self._sequences: set[DropSequence] = set()
        self.references: Counter[int] = Counter()  # by block: how many parts of sequences hold it
        self._located: Sequence[KVLocation] = ()  # of the latest step, by layer
        self.contract = Contract(exact=False, rewind=0, replayable=False, chunk_invariant=False)

    @classmethod
    def _count_parts(cls, spec: LayerSpec) -> int:
        """Return the number of parts of a layer that keep tokens of their own."""
        return spec.num_kv_heads if cls.split_heads else 1

    def _make_arrays(self, geometry: Geometry, device: torch.device) -> Mapping[str, Tensor]:
        """Return the memory of what differs from step to step: as large as it may become, so that it stays there."""
        rows, tokens = geometry.max_seats, geometry.max_seats * geometry.max_seq_len
        sizes: dict[str, tuple[int, ...]] = {"q_start": (rows + 1,)}
        for layer, heads in enumerate(self._heads):
            by_head = (heads,) if self.split_heads else ()
            for name, count in (("table_row", rows), ("start", rows), ("window_start", tokens)):
                sizes[f"{name} {layer}"] = (count, *by_head)
        return {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}

    def _fill(self, name: str, values: Sequence[Any]) -> Tensor:
        """Return an array of a step with these values: [n], or [n, heads] if heads are split."""
        array = self._arrays[name][: len(values)]
        array.copy_(torch.tensor(values, dtype=torch.int32).view(array.shape))
        return array

    # ---------------------------------------------------------------- memory
    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        return Sizes(
            [cls._compute_block_bytes(options, geometry)],
            lambda num_tokens: [cls._count_blocks(options, geometry, num_tokens)],
        )

    @classmethod
    def _compute_block_bytes(cls, options: Any, geometry: Geometry) -> int:
        stored = (spec._replace(num_kv_heads=1) if cls.split_heads else spec for spec in geometry.layers)
        formats = resolve_kv_formats(options, geometry)
        sizes: list[int] = [compute_block_bytes([spec], options.block_size, formats) for spec in stored]
        return max(sizes)

    @classmethod
    def _count_blocks(cls, options: Any, geometry: Geometry, num_tokens: int) -> int:
        """Return the most blocks of a sequence: while its tokens are moved, twice those of the tokens."""
        blocks: int = -(-num_tokens // options.block_size)
        return 2 * blocks * sum(map(cls._count_parts, geometry.layers))

    def allocate(self, count: int) -> list[int] | None:
        """Return this number of new blocks; None if there is not enough memory."""
        blocks = self._region.allocate(count)
        if blocks is not None:
            self.references.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each of the blocks, and empty the list; free those that nothing else holds."""
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                self._region.release([block])
        blocks.clear()

    # ---------------------------------------------------------------- sequences
    def open(self, text: Text) -> DropSequence | None:
        if not self._free:
            return None
        index = self._free.pop()
        layers = [[KeptTokens(index * heads + head) for head in range(heads)] for heads in self._heads]
        opened = DropSequence(self, index, layers)
        self._sequences.add(opened)
        return opened

    def remove(self, sequence: DropSequence) -> None:
        """Forget a sequence, whose memory is free."""
        self._sequences.remove(sequence)
        self._free.append(sequence.index)

    # ---------------------------------------------------------------- steps
    def locate(self, rows: Rows[DropSequence]) -> Locations:
        """Return addresses that count kept tokens, other ones in each layer; take each row's last query."""
        q_start = self._fill("q_start", [0, *accumulate(rows.counts)])
        self._located = [
            KVLocation(store, self._make_slots(rows, layer, q_start), None) for layer, store in enumerate(self.stores)
        ]
        return Locations(self._located, make_tap_of_last_tokens(self.setup, rows, [True] * len(self.stores)))

    def _make_slots(self, rows: Rows[DropSequence], layer: int, q_start: Tensor) -> Slots:
        spec, parts = self.setup.geometry.layers[layer], [sequence.layers[layer] for sequence in rows.sequences]
        for part in (part for of_row in parts for part in of_row):
            self.tables[layer][part.table_row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
        starts = [[len(part.positions) for part in of_row] for of_row in parts]
        return Slots(
            table=self.tables[layer],
            block_size=self.block_size,
            table_row=self._fill(f"table_row {layer}", [[part.table_row for part in of_row] for of_row in parts]),
            q_start=q_start,
            start=self._fill(f"start {layer}", starts),
            num_decode=rows.num_decode,
            max_q=rows.longest,
            max_kv=max(max(start) + n for start, n in zip(starts, rows.counts, strict=True)),
            window_start=None
            if spec.window is None
            else self._fill(f"window_start {layer}", list(_iter_window_starts(rows, layer, spec.window))),
        )

    def gather(self, layer: int, rows: Rows[DropSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        window, end = self.setup.geometry.layers[layer].window, rows.end(row)
        kept = rows.sequences[row].list_positions(layer, end)
        first = [0 if window is None else bisect_left(positions, end - window) for positions in kept]
        counts = [len(positions) - begin for positions, begin in zip(kept, first, strict=True)]
        positions, indices = torch.full((2, max(counts), len(kept)), -1)
        for head, (begin, count) in enumerate(zip(first, counts, strict=True)):
            positions[:count, head] = torch.tensor(kept[head][begin:])
            indices[:count, head] = torch.arange(begin, begin + count)
        indices = indices.clamp_min(0)  # of what only fills up
        store, at, _ = self._located[layer]
        if not store.split_heads:
            positions, indices = positions[:, 0], indices[:, 0].contiguous()
        k, v = self.setup.ops.gather(store, layer, at, row, indices.to(store.device))
        return k, v, positions.to(store.device)

    def move(self, layer: int, part: KeptTokens, kept: list[int]) -> None:
        """Move the keys and values of these positions to the spare blocks, and free the blocks in which they were."""
        index = {position: i for i, position in enumerate(part.positions)}
        count = -(-len(kept) // self.block_size)
        fresh, part.spare = part.spare[:count], part.spare[count:]
        source, target = (
            self._locate(blocks, indices)
            for blocks, indices in (
                (part.blocks, [index[position] for position in kept]),
                (fresh, list(range(len(kept)))),
            )
        )
        for plane in self.stores[layer].planes(layer):
            for numbers in plane.parts:
                numbers[target[0], :, target[1]] = numbers[source[0], :, source[1]]
        self.release(part.blocks)
        part.blocks, part.positions = fresh, kept

    def _locate(self, blocks: Sequence[int], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (block, slot within the block) of the tokens with these indices."""
        at = torch.tensor(indices, dtype=torch.int64, device=self.setup.memory.device)
        return torch.tensor(blocks, dtype=torch.int64, device=at.device)[at // self.block_size], at % self.block_size

    # ---------------------------------------------------------------- reports
    def count_visible(self, layer: int, length: int) -> int:
        spec = self.setup.geometry.layers[layer]
        begin = 0 if spec.window is None else max(0, length + 1 - spec.window)  # of what the next token uses
        kept = [list_kept(length, self.every, layer, head) for head in range(self._heads[layer])]
        return sum(len(positions) - bisect_left(positions, begin) for positions in kept) // len(kept)

    def usage(self) -> CacheUsage:
        tokens = len({entered for sequence in self._sequences for entered in sequence.entered})
        full: dict[int, float] = {}  # by block, the bytes of its tokens
        for sequence in self._sequences:
            for store, parts in zip(self.stores, sequence.layers, strict=True):
                for part in parts:
                    for i, block in enumerate(part.blocks):
                        slots = min(max(0, len(part.positions) - i * self.block_size), self.block_size)
                        full[block] = store.block_bytes * slots / self.block_size
        reserved, used = len(self.references) * self._region.size, int(sum(full.values()))
        limit = self.setup.memory.limit_bytes
        return CacheUsage(len(self._sequences), tokens, reserved, used, 0, reserved - used, limit)

    def blocks(self) -> Blocks:
        return Blocks(in_use=len(self.references), shared=sum(count > 1 for count in self.references.values()))

    def check_integrity(self) -> None:
        assert self._region.num_held == len(self.references)
        parts = [part for sequence in self._sequences for part in sequence.parts]
        assert Counter(block for part in parts for block in (*part.blocks, *part.spare)) == self.references
        for sequence in self._sequences:
            assert sequence.length == len(sequence.entered)
            for part in sequence.parts:
                assert part.positions == sorted({*part.positions})
                assert len(part.positions) <= len(part.blocks) * self.block_size
                assert all(0 <= position < sequence.length for position in part.positions)


class RandomDropByHeadCache(RandomDropCache):
    """A cache that keeps other tokens, and another number of them, in each KV head of a layer."""

    split_heads = True
