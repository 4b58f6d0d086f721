"""random_drop and random_drop_by_head: strategies that drop keys at random, and count addresses in kept tokens.

The text has a boundary at every multiple of `every`. As soon as a sequence has reached one, a random part of the tokens
before it is dropped. What is drawn depends on the ids before the boundary, the layer and, in random_drop_by_head, the
KV head: so all that a seat keeps follows from its ids, in whatever rows they came.

A row may cross a boundary, as `max_row` is only a maximum. Tokens are dropped in commit(), so the queries behind the
boundary still see the keys of their row's beginning: attention depends on the rows (chunk_invariant is False), and with
it do the keys of the next layer, so that a sequence that is computed again may differ (replayable is False).

Each layer, or each KV head of a layer, has a `KeptTokens` with blocks of its own. Kept keys are moved to fresh blocks,
never within a block, as forks share full blocks. grow() allocates the blocks to move to, since commit() must not fail.
"""

from __future__ import annotations

import hashlib
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

from cache_strategies.base import CacheSetup, KVCache, Plan, Row, Seat
from cache_strategies.block_table import TableOptions, resolve_kv_dtype
from cache_strategies.types import NO_SALT, Blocks, CacheUsage, Contract, Geometry, Salt, Sizes
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec, Slots
from tests.contract.kinds.hooked import make_tap_of_last_tokens


# -------------------------------------------------------------------- which tokens are dropped
def choose_survivors(ids: Sequence[int], boundary: int, layer: int, head: int, kept: Sequence[int]) -> list[int]:
    """Return those of the `kept` positions that are still kept when a sequence with these ids reaches a boundary."""
    seed = hashlib.blake2b(repr((list(ids[:boundary]), layer, head)).encode(), digest_size=8).digest()
    rng = random.Random(seed)
    before = [position for position in kept if position < boundary]
    return sorted(rng.sample(before, rng.randint(len(before) // 4, len(before)))) + list(kept[len(before) :])


def list_kept(ids: Sequence[int], length: int, every: int, layer: int, head: int = 0) -> list[int]:
    """Return the positions that are kept of the first `length` tokens, by the definition."""
    kept = list(range(length))
    for boundary in range(every, length + 1, every):
        kept = choose_survivors(ids, boundary, layer, head, kept)
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


class DropSeat(Seat):
    """A seat, its tokens, and what is kept of them: by layer, one KeptTokens or one for each KV head."""

    __slots__ = ("entered", "index", "layers")

    def __init__(self, index: int, layers: Sequence[Sequence[KeptTokens]]) -> None:
        super().__init__()
        self.miss = "bypass"
        self.index = index
        self.entered: list[Entered] = []
        self.layers = layers

    @property
    def parts(self) -> Iterator[KeptTokens]:
        """The KeptTokens of all layers, one after the other."""
        return (part for layer in self.layers for part in layer)


# -------------------------------------------------------------------- a step
class DropPlan(Plan[DropSeat]):
    """A plan that counts kept tokens, with addresses of its own in each layer, and takes each row's last query."""

    def __init__(self, cache: RandomDropCache, rows: Sequence[Row[DropSeat]]) -> None:
        self.rows = rows
        self._setup = cache.setup
        self._stores = cache.stores
        q_start = cache.fill("q_start", [0, *accumulate(row.num_tokens for row in rows)])
        self._locations = [
            KVLocation(store, self._make_slots(cache, layer, q_start), None) for layer, store in enumerate(cache.stores)
        ]
        self.query_tap = make_tap_of_last_tokens(cache.setup, rows, [True] * len(cache.stores))

    def _make_slots(self, cache: RandomDropCache, layer: int, q_start: Tensor) -> Slots:
        spec, parts = self._setup.geometry.layers[layer], [row.seat.layers[layer] for row in self.rows]
        for part in (part for of_row in parts for part in of_row):
            cache.tables[layer][part.table_row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
        starts = [[len(part.positions) for part in of_row] for of_row in parts]
        lengths = [row.num_tokens for row in self.rows]
        return Slots(
            table=cache.tables[layer],
            block_size=cache.block_size,
            table_row=cache.fill(f"table_row {layer}", [[part.table_row for part in of_row] for of_row in parts]),
            q_start=q_start,
            start=cache.fill(f"start {layer}", starts),
            num_decode=lengths.count(1),
            max_q=max(lengths),
            max_kv=max(max(start) + n for start, n in zip(starts, lengths, strict=True)),
            window_start=None
            if spec.window is None
            else cache.fill(f"window_start {layer}", list(self._iter_window_starts(layer, spec.window))),
        )

    def _list_positions(self, row: Row[DropSeat], layer: int) -> list[list[int]]:
        """Return, for each part of a layer, the positions that it keeps with those of the row."""
        new = range(row.seat.length, row.seat.length + row.num_tokens)
        return [[*part.positions, *new] for part in row.seat.layers[layer]]

    def _iter_window_starts(self, layer: int, window: int) -> Iterator[list[int]]:
        """Yield for each token of the step the index of the oldest token in its window, in each part of the layer."""
        for row in self.rows:
            kept = self._list_positions(row, layer)
            for position in range(row.seat.length, row.seat.length + row.num_tokens):
                yield [bisect_right(positions, position - window) for positions in kept]

    def kv_location(self, layer_idx: int) -> KVLocation:
        return self._locations[layer_idx]

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        window, seat = self._setup.geometry.layers[layer_idx].window, self.rows[row].seat
        last = seat.length + self.rows[row].num_tokens - 1
        kept = self._list_positions(self.rows[row], layer_idx)
        first = [0 if window is None else bisect_left(positions, last + 1 - window) for positions in kept]
        counts = [len(positions) - begin for positions, begin in zip(kept, first, strict=True)]
        positions, indices = torch.full((2, max(counts), len(kept)), -1)
        for head, (begin, count) in enumerate(zip(first, counts, strict=True)):
            positions[:count, head] = torch.tensor(kept[head][begin:])
            indices[:count, head] = torch.arange(begin, begin + count)
        indices = indices.clamp_min(0)  # of what only fills up
        store, at, _ = self._locations[layer_idx]
        if not store.split_heads:
            positions, indices = positions[:, 0], indices[:, 0].contiguous()
        k, v = self._setup.ops.gather(store, layer_idx, at, row, indices.to(store.device))
        return k, v, positions.to(store.device)


# -------------------------------------------------------------------- the cache
class RandomDropCache(KVCache[DropSeat]):
    """A cache that keeps a random part of a sequence's tokens, the same in all KV heads of a layer."""

    interface_version = 2
    options_type = DropOptions
    split_heads = False

    def __init__(self, setup: CacheSetup, options: DropOptions) -> None:
        super().__init__(setup, options)
        geometry, device = setup.geometry, setup.memory.device
        self.every, self.block_size = options.every, options.block_size
        dtype = resolve_kv_dtype(options, geometry)
        # Blocks of all layers lie in one region, and have the size of the largest
        self._region = setup.memory.region(self._compute_block_bytes(options, geometry))
        self.stores = [
            KVStore(self._region, {i: spec}, self.block_size, dtype, split_heads=self.split_heads)
            for i, spec in enumerate(geometry.layers)
        ]
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, dtype)
        self._heads = [self._count_parts(spec) for spec in geometry.layers]
        width = -(-geometry.max_seq_len // self.block_size)
        self.tables = [
            torch.zeros(geometry.max_seats * heads, width, dtype=torch.int32, device=device) for heads in self._heads
        ]
        self._arrays = self._make_arrays(geometry, device)
        self._free = list(range(geometry.max_seats))
        self._seats: set[DropSeat] = set()
        self._references: Counter[int] = Counter()  # by block: how many parts of seats hold it
        self.contract = Contract(
            exact=False,
            forkable=True,
            rewind=0,
            replayable=False,
            chunk_invariant=False,
            max_row=None,
        )

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

    def fill(self, name: str, values: Sequence[Any]) -> Tensor:
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
        dtype = resolve_kv_dtype(options, geometry)
        sizes: list[int] = [compute_block_bytes([spec], options.block_size, dtype) for spec in stored]
        return max(sizes)

    @classmethod
    def _count_blocks(cls, options: Any, geometry: Geometry, num_tokens: int) -> int:
        """Return the most blocks of a sequence: while its tokens are moved, twice those of the tokens."""
        return 2 * -(-num_tokens // options.block_size) * sum(map(cls._count_parts, geometry.layers))

    def _allocate(self, count: int) -> list[int] | None:
        """Return this number of new blocks; None if there is not enough memory."""
        blocks = self._region.allocate(count)
        if blocks is not None:
            self._references.update(blocks)
        return blocks

    def _release(self, blocks: list[int]) -> None:
        """Drop a reference to each of the blocks, and empty the list; free those that nothing else holds."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._region.release([block])
        blocks.clear()

    # ---------------------------------------------------------------- seats
    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> DropSeat | None:
        if not self._free:
            return None
        index = self._free.pop()
        layers = [[KeptTokens(index * heads + head) for head in range(heads)] for heads in self._heads]
        seat = DropSeat(index, layers)
        self._seats.add(seat)
        return seat

    def grow(self, seat: DropSeat, num_tokens: int) -> bool:
        drops = (seat.length + num_tokens) // self.every > seat.length // self.every
        lacking: list[tuple[list[int], int]] = []
        for part in seat.parts:
            total = -(-(len(part.positions) + num_tokens) // self.block_size)
            lacking += [(part.blocks, total - len(part.blocks)), (part.spare, drops * total - len(part.spare))]
        blocks = self._allocate(sum(max(0, count) for _, count in lacking))
        if blocks is None:
            return False
        for target, count in lacking:
            target += [blocks.pop() for _ in range(count)]
        return True

    def crop(self, seat: DropSeat, length: int) -> None:
        assert length == seat.length, "more than contract.rewind"

    def fork(self, seat: DropSeat) -> DropSeat | None:
        child = self.open(())
        if child is None:
            return None
        ends = [layer for layer, parts in enumerate(seat.layers) for p in parts if len(p.positions) % self.block_size]
        copies = self._allocate(len(ends))
        if copies is None:
            self.close(child)
            return None
        child.length, child.cached, child.entered = seat.length, seat.cached, list(seat.entered)
        for layer, (ours, theirs) in enumerate(zip(child.layers, seat.layers, strict=True)):
            for part, parent in zip(ours, theirs, strict=True):
                full, rest = divmod(len(parent.positions), self.block_size)
                part.positions, part.blocks = list(parent.positions), parent.blocks[:full]
                self._references.update(part.blocks)
                if rest:
                    part.blocks.append(copies.pop())
                    self.setup.ops.copy_blocks(self.stores[layer], [parent.blocks[full]], [part.blocks[full]])
        return child

    def close(self, seat: DropSeat) -> None:
        for part in seat.parts:
            self._release(part.blocks)
            self._release(part.spare)
        self._seats.remove(seat)
        self._free.append(seat.index)

    # ---------------------------------------------------------------- steps
    def poll(self) -> None:
        pass

    def plan(self, rows: Sequence[Row[DropSeat]]) -> DropPlan:
        return DropPlan(self, rows)

    def commit(self, plan: Plan[DropSeat], tokens: Sequence[Sequence[int]]) -> None:
        for (seat, _), ids in zip(plan.rows, tokens, strict=True):
            start, seat.length = seat.length, seat.length + len(ids)
            seat.entered += map(Entered, ids)
            whole = [each.id for each in seat.entered]
            boundaries = [at for at in range(start + 1, seat.length + 1) if at % self.every == 0]
            for layer, parts in enumerate(seat.layers):
                for head, part in enumerate(parts):
                    part.positions += range(start, seat.length)
                    kept = part.positions
                    for boundary in boundaries:
                        kept = choose_survivors(whole, boundary, layer, head, kept)
                    if kept != part.positions:
                        self._move(layer, part, kept)
                    self._release(part.spare)

    def _move(self, layer: int, part: KeptTokens, kept: list[int]) -> None:
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
            for numbers in (plane.numbers, plane.scale):
                if numbers is not None:
                    numbers[target[0], :, target[1]] = numbers[source[0], :, source[1]]
        self._release(part.blocks)
        part.blocks, part.positions = fresh, kept

    def _locate(self, blocks: Sequence[int], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (block, slot within the block) of the tokens with these indices."""
        at = torch.tensor(indices, dtype=torch.int64, device=self.setup.memory.device)
        return torch.tensor(blocks, dtype=torch.int64, device=at.device)[at // self.block_size], at % self.block_size

    # ---------------------------------------------------------------- reports
    def count_dropped_tokens(self, seat: DropSeat) -> int:
        dropped = 0  # in all KV heads
        for spec, parts in zip(self.setup.geometry.layers, seat.layers, strict=True):
            begin = 0 if spec.window is None else max(0, seat.length + 1 - spec.window)  # of what the next token uses
            kept = sum(len(part.positions) - bisect_left(part.positions, begin) for part in parts)
            used = (seat.length - begin) * len(parts)
            dropped += (used - kept) * spec.num_kv_heads // len(parts)
        return dropped // sum(spec.num_kv_heads for spec in self.setup.geometry.layers)

    def usage(self) -> CacheUsage:
        tokens = len({entered for seat in self._seats for entered in seat.entered})
        full: dict[int, float] = {}  # by block, the bytes of its tokens
        for seat in self._seats:
            for store, parts in zip(self.stores, seat.layers, strict=True):
                for part in parts:
                    for i, block in enumerate(part.blocks):
                        slots = min(max(0, len(part.positions) - i * self.block_size), self.block_size)
                        full[block] = store.block_bytes * slots / self.block_size
        reserved, used = len(self._references) * self._region.size, int(sum(full.values()))
        return CacheUsage(len(self._seats), tokens, reserved, used, 0, reserved - used, self.setup.memory.limit_bytes)

    def blocks(self) -> Blocks:
        return Blocks(in_use=len(self._references), shared=sum(count > 1 for count in self._references.values()))

    def check_integrity(self) -> None:
        assert self._region.num_held == len(self._references)
        parts = [part for seat in self._seats for part in seat.parts]
        assert Counter(block for part in parts for block in (*part.blocks, *part.spare)) == self._references
        for seat in self._seats:
            assert seat.length == len(seat.entered)
            for part in seat.parts:
                assert part.positions == sorted({*part.positions})
                assert len(part.positions) <= len(part.blocks) * self.block_size
                assert all(0 <= position < seat.length for position in part.positions)


class RandomDropByHeadCache(RandomDropCache):
    """A cache that keeps other tokens, and another number of them, in each KV head of a layer."""

    interface_version = 2
    split_heads = True
