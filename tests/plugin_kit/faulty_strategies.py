"""Strategies as third parties might write them, each with one mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, Plan, Row, Seat
from cache_strategies.block_table import TableOptions, TablePlan, TableSeat
from cache_strategies.compressed.cache import CompressedCache
from cache_strategies.compressed.seat import CompressedSeat
from cache_strategies.contiguous import ContiguousCache
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache
from cache_strategies.single_block import SingleBlockCache
from cache_strategies.sliding_window import SlidingWindowCache, WindowOptions
from cache_strategies.streaming.cache import StreamingCache
from cache_strategies.streaming.options import StreamingOptions
from cache_strategies.types import KEEPS_EVERYTHING, NO_SALT, BlockInfo, CachedPrefix, CacheUsage, Geometry, Salt, Sizes
from kernels.types import LayerSpec
from tests.contract.kinds.hooked import HookedCache, HookedOptions, HookedPlan
from tests.contract.kinds.random_drop import DropOptions, RandomDropCache
from tests.contract.third_party_strategy import SieveCache, SievePlan


class SoundCache(SingleBlockCache[TableSeat]):
    """Keeps every token of a running sequence, and makes no mistake."""

    interface_version = 2

    def __init__(self, setup: CacheSetup, options: TableOptions) -> None:
        super().__init__(setup, options)
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.is_quantized)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1


# ---------------------------------------------------------------- what is attended to
class HidingPlan(TablePlan[TableSeat]):
    """A plan that attends to the first key, and does not list it."""

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v, positions = super().gather_kv(layer_idx, row)
        return (k[1:], v[1:], positions[1:]) if len(positions) > 1 else (k, v, positions)


class WrongGather(SoundCache):
    def plan(self, rows: Sequence[Row[TableSeat]]) -> Plan[TableSeat]:
        return HidingPlan(self, rows, self.table.make_slots(rows))


class BlindToWindows(SoundCache):
    """Lists all keys in layers with a window of their own, too."""

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        return torch.arange(length)


class ForgetfulExact(SoundCache):
    window = 40


class WrongCount(SlidingWindowCache):
    interface_version = 2

    def count_dropped_tokens(self, seat: TableSeat) -> int:
        return max(0, seat.length - self.window)


class HookCache(HookedCache):
    """A cache that computes all layers itself; subclasses change the output."""

    def __init__(self, setup: CacheSetup, options: HookedOptions) -> None:
        super().__init__(setup, HookedOptions(layers="all"))

    def plan(self, rows: Sequence[Row[TableSeat]]) -> HookedPlan:
        return self.plan_type(self, rows)

    plan_type: type[HookedPlan] = HookedPlan


class SpreadingPlan(HookedPlan):
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer_idx, q, k, v, out)
        out += 0 * k.sum()  # of all rows: NaN times 0 is NaN


class NaNSpreads(HookCache):
    plan_type = SpreadingPlan


class CountingPlan(HookedPlan):
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer_idx, q, k, v, out)
        out *= 1 + 0.01 * (len(self.rows) - 1)


class BatchDependent(HookCache):
    plan_type = CountingPlan


class WholeBlockPlan(HookedPlan):
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer_idx, q, k, v, out)
        whole_block = self._cache.store.k(layer_idx)[self.rows[0].seat.blocks[0]]
        out += 0 * whole_block.sum()  # as a mask does that multiplies


class ReadsUnused(HookCache):
    plan_type = WholeBlockPlan


# ---------------------------------------------------------------- doing it again
class OwnMood(SlidingWindowCache):
    """Another window for each of three sequences."""

    interface_version = 2
    opened = 0

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> TableSeat | None:
        self.opened += 1
        self.window = self.options.window - self.opened % 3
        return super().open(tokens, salt=salt, max_cached=max_cached)


class ChunkDependent(RandomDropCache):
    def __init__(self, setup: CacheSetup, options: DropOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(chunk_invariant=True)


class LongRows(SoundCache):
    def __init__(self, setup: CacheSetup, options: TableOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(max_row=16)

    def row_limit(self, seat: TableSeat) -> int | None:
        return 40 if seat.length else 16

    def grow(self, seat: TableSeat, num_tokens: int) -> bool:
        return True


class SharingFork(SoundCache):
    """A fork has its parent's block, which both write."""

    def fork(self, seat: TableSeat) -> TableSeat | None:
        if self.table.is_full:
            return None
        child = self._make_seat(seat.blocks[0], seat.length)
        child.cached = seat.cached
        return child

    def close(self, seat: TableSeat) -> None:
        self.seats.remove(seat)
        self.table.release_row(seat.index)
        if all(seat.blocks != other.blocks for other in self.seats):
            self.region.release([seat.blocks.pop()])

    def check_integrity(self) -> None:
        pass


class RewindLies(SlidingWindowCache):
    """A ring that has overwritten what it says that it can bring back."""

    interface_version = 2

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(rewind=None)


class AppendingPlan(SievePlan):
    """A plan that appends its keys, though those of a failed attempt may be there already."""

    def _enter(self, row: Row, layer: int, k: Tensor, v: Tensor) -> None:
        old_k, old_v = row.seat.layers[layer]  # type: ignore[attr-defined]
        row.seat.layers[layer] = torch.cat((old_k, k)), torch.cat((old_v, v))  # type: ignore[attr-defined]


class NotRepeatable(SieveCache):
    plan_type = AppendingPlan


class AllDraftsStay(SoundCache):
    def commit(self, plan: Plan[TableSeat], tokens: Sequence[Sequence[int]]) -> None:
        for row in plan.rows:
            row.seat.length += row.num_tokens


class HastyCompaction(CompressedCache):
    """Gives up what it holds before the copies are made."""

    interface_version = 2

    def compact(self, seat: Any) -> None:
        if seat.length % self.options.every == 0 and getattr(self, "tried", None) == (id(seat), seat.length):
            seat.boundary = seat.length
            return
        self.tried = (id(seat), seat.length)
        super().compact(seat)


# ---------------------------------------------------------------- memory
class Leak(SoundCache):
    def close(self, seat: TableSeat) -> None:
        if seat.length:
            super().close(seat)
            return
        self.seats.remove(seat)  # and its block stays
        self.table.release_row(seat.index)

    def check_integrity(self) -> None:
        pass


class TooFewBlocks(SoundCache):
    """Says that short texts take no memory."""

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        sizes = super().sizes(options, geometry)
        return Sizes(sizes.block_bytes, lambda num_tokens: [int(num_tokens > 100)])


class FallingSizes(SoundCache):
    """Says that short texts take more than long ones."""

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        sizes = super().sizes(options, geometry)
        return Sizes(sizes.block_bytes, lambda num_tokens: [2 if num_tokens < 100 else 1])


class OtherBlocks(SoundCache):
    """Says that its blocks are larger than those of its region."""

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        (size,), count_blocks = super().sizes(options, geometry)
        return Sizes([2 * size], count_blocks)


class GrowsForever(StreamingCache):
    """A streaming cache that takes a block at each boundary, and frees none before a sequence ends."""

    interface_version = 2

    def __init__(self, setup: CacheSetup, options: StreamingOptions) -> None:
        super().__init__(setup, options)
        self._taken: list[int] = []

    def compact(self, seat: CompressedSeat) -> int | None:
        dropped = super().compact(seat)
        if dropped:
            self._taken += self.memory.regions[0].allocate() or ()
        return dropped

    def close(self, seat: CompressedSeat) -> None:
        super().close(seat)
        while self._taken:
            self.memory.regions[0].release([self._taken.pop()])


class EndlessWindow(SlidingWindowCache):
    """A window that lets texts go on, and counts positions in the text."""

    interface_version = 2

    def __init__(self, setup: CacheSetup, options: WindowOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(unbounded=True)

    def grow(self, seat: TableSeat, num_tokens: int) -> bool:
        return True


class PlanThatWritesElsewhere(Plan[TableSeat]):
    """Computes by a hook what another plan says, and writes into blocks that are not its own."""

    def __init__(self, cache: SoundCache, right: Plan[TableSeat]) -> None:
        self.rows, self._cache, self._right = right.rows, cache, right

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self._cache.attend(self._right, layer_idx, q, k, v, out)
        region = self._cache.region
        region.memory[region.page_bytes - 1 :: region.page_bytes] = layer_idx + self.rows[0].seat.length % 100

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._right.gather_kv(layer_idx, row)


class WritesElsewhere(SoundCache):
    def plan(self, rows: Sequence[Row[TableSeat]]) -> Plan[TableSeat]:
        return PlanThatWritesElsewhere(self, super().plan(rows))


class RepeatsOneHead(SoundCache):
    """Takes the keys of one head for those of all, as an assignment to a larger tensor does."""

    def attend(self, plan: Plan[TableSeat], layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        heads = self.setup.geometry.layers[layer_idx].num_kv_heads
        super().attend(plan, layer_idx, q, *(x.expand(-1, heads, -1) for x in (k, v)), out)


class WrongUsage(SoundCache):
    def usage(self) -> CacheUsage:
        return super().usage()._replace(wasted=0)


class SaltBlind(PagedCache):
    """Finds what was computed under any salt."""

    interface_version = 2

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> Any:
        return super().open(tokens, max_cached=max_cached)


class ParentsLast(PagedCache):
    """Lists children before their parents."""

    interface_version = 2

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        prefixes, omitted = super().list_prefixes(limit)
        return prefixes[::-1], omitted


class LosesHits(PagedCache):
    """Counts a hit with the longest prefix that was found, and with no prefix of it."""

    interface_version = 2

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        prefixes, omitted = super().list_prefixes(limit)
        parents = {each.parent for each in prefixes}
        return [each._replace(hits=int(each.id not in parents)) for each in prefixes], omitted


class DropsNothing(PagedCache):
    """Keeps what an operator wants to be dropped."""

    interface_version = 2

    def drop_prefix(self, prefix_id: str) -> int | None:
        return 0


class KnowsAllBlocks(SoundCache):
    """Describes blocks that it does not hold."""

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        return BlockInfo(None, None, 0, 0)


class WrongIdleBytes(ContiguousCache):
    """Says that nothing can be freed."""

    interface_version = 2
    idle_bytes = 0


class EvictsTooLittle(PagedCache):
    """Frees one block, however many bytes are asked for."""

    interface_version = 2

    def evict(self, num_bytes: int) -> int:
        return super().evict(1)


# ---------------------------------------------------------------- calls
class WrongType(SoundCache):
    def grow(self, seat: TableSeat, num_tokens: int) -> bool:
        return "yes"  # type: ignore[return-value]


class ForksAnyway(SoundCache):
    def __init__(self, setup: CacheSetup, options: TableOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(forkable=False)


class RaisesWhenFull(SoundCache):
    """Has no answer when there is no memory."""

    def _allocate_seat(self, length: int) -> TableSeat | None:
        seat = super()._allocate_seat(length)
        assert seat is not None, "no memory left"
        return seat


class OldVersion(SoundCache):
    interface_version = 1


class NotFinished(KVCache):
    interface_version = 2

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> Seat | None:
        return None


class WindowTooWide(SlidingWindowCache):
    """Drops nothing in the texts of the checks, with the only options that it is checked with."""

    interface_version = 2
