"""Strategies as third parties might write them, each with one mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Rows
from cache_strategies.block_table import TableOptions
from cache_strategies.compressed.cache import CompressedCache, CompressedSequence
from cache_strategies.contiguous import ContiguousCache
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.single_block import SingleBlockCache, SingleBlockSequence
from cache_strategies.sliding_window import SlidingWindowCache, WindowOptions, WindowSequence
from cache_strategies.streaming.cache import StreamingCache, StreamingSequence
from cache_strategies.streaming.options import StreamingOptions
from cache_strategies.types import KEEPS_EVERYTHING, NO_SALT, BlockInfo, CachedPrefix, CacheUsage, Geometry, Sizes, Text
from kernels.ops import KVLocation
from kernels.types import LayerSpec
from tests.contract.kinds.hooked import HookedCache, HookedOptions
from tests.contract.kinds.random_drop import DropOptions, RandomDropCache
from tests.contract.third_party_strategy import SieveCache, SieveSequence


class SoundCache(SingleBlockCache[SingleBlockSequence]):
    """Keeps every token of a running sequence, and makes no mistake."""

    interface_version = 3

    def __init__(self, setup: CacheSetup, options: TableOptions) -> None:
        super().__init__(setup, options)
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.is_quantized)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1


# ---------------------------------------------------------------- what is attended to
class WrongGather(SoundCache):
    """Attends to the first key, and does not list it."""

    def gather(self, layer: int, rows: Rows[SingleBlockSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v, positions = super().gather(layer, rows, row)
        return (k[1:], v[1:], positions[1:]) if len(positions) > 1 else (k, v, positions)


class BlindToWindows(SoundCache):
    """Lists all keys in layers with a window of their own, too."""

    def list_visible_positions(self, length: int, spec: LayerSpec) -> Tensor:
        return torch.arange(length)


class ForgetfulExact(SoundCache):
    window = 40


class WrongCount(SlidingWindowCache):
    """Counts neither sinks nor the windows of layers."""

    interface_version = 3

    def count_visible(self, layer: int, length: int) -> int:
        return min(length, self.window)


class HookCache(HookedCache):
    """A cache that computes all layers itself; subclasses change the output."""

    def __init__(self, setup: CacheSetup, options: HookedOptions) -> None:
        super().__init__(setup, HookedOptions(layers="all"))


class NaNSpreads(HookCache):
    def attend(self, layer: int, rows: Rows[SingleBlockSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer, rows, q, k, v, out)
        out += 0 * k.sum()  # of all rows: NaN times 0 is NaN


class BatchDependent(HookCache):
    def attend(self, layer: int, rows: Rows[SingleBlockSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer, rows, q, k, v, out)
        out *= 1 + 0.01 * (len(rows) - 1)


class ReadsUnused(HookCache):
    def attend(self, layer: int, rows: Rows[SingleBlockSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        super().attend(layer, rows, q, k, v, out)
        whole_block = self.store.k(layer)[rows.sequences[0].blocks[0]]
        out += 0 * whole_block.sum()  # as a mask does that multiplies


# ---------------------------------------------------------------- doing it again
class OwnMood(SlidingWindowCache):
    """Another window for each of three sequences."""

    interface_version = 3
    opened = 0

    def open(self, text: Text) -> WindowSequence | None:
        self.opened += 1
        self.window = self.options.window - self.opened % 3
        return super().open(text)


class ChunkDependent(RandomDropCache):
    def __init__(self, setup: CacheSetup, options: DropOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(chunk_invariant=True)


class StuckSequence(SingleBlockSequence):
    """A sequence whose rows end at the same position for ever."""

    def __init__(self, cache: SingleBlockCache[Any], block: int, length: int = 0) -> None:
        super().__init__(cache, block, length)
        self.stop = 40


class Stuck(SoundCache):
    sequence_type = StuckSequence


class LongRowsSequence(WindowSequence):
    """A sequence that lets rows be longer than its ring can take."""

    def reserve(self, num_tokens: int) -> bool:
        return True

    def commit(self, ids: Sequence[int]) -> None:
        super().commit(ids)
        self.stop = None


class LongRows(SlidingWindowCache):
    interface_version = 3
    sequence_type = LongRowsSequence


class SharingSequence(SingleBlockSequence):
    """A sequence whose fork has its parent's block, which both write."""

    def fork(self) -> SharingSequence | None:
        cache = self.cache
        if cache.table.is_full:
            return None
        child = type(self)(cache, self.blocks[0], self.length)
        child.found = self.found
        return child

    def close(self) -> None:
        block = self.leave()
        if all(block not in other.blocks for other in self.cache.sequences):
            self.cache.region.release([block])


class SharingFork(SoundCache):
    sequence_type = SharingSequence

    def check_integrity(self) -> None:
        pass


class ForklessSequence(SingleBlockSequence):
    """A sequence that has a method fork(), and is never forked."""

    def fork(self) -> None:
        return None


class NeverForks(SoundCache):
    sequence_type = ForklessSequence


class RewindLies(SlidingWindowCache):
    """A ring that has overwritten what it says that it can bring back."""

    interface_version = 3

    def __init__(self, setup: CacheSetup, options: Any) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(rewind=None)


class NotRepeatable(SieveCache):
    """Appends keys, though those of a failed attempt may be there already."""

    def enter(self, sequence: SieveSequence, layer: int, k: Tensor, v: Tensor) -> None:
        old_k, old_v = sequence.layers[layer]
        sequence.layers[layer] = torch.cat((old_k, k)), torch.cat((old_v, v))


class GreedySequence(SingleBlockSequence):
    """A sequence that commits all tokens of a row, whichever were accepted."""

    num_located = 0  # in the latest step

    def commit(self, ids: Sequence[int]) -> None:
        self.length += self.num_located


class AllDraftsStay(SoundCache):
    sequence_type = GreedySequence

    def locate(self, rows: Rows[Any]) -> Locations:
        for each, num_tokens in zip(rows.sequences, rows.counts, strict=True):
            each.num_located = num_tokens
        return super().locate(rows)


class HastySequence(CompressedSequence):
    """A sequence that gives up what it holds before the copies are made."""

    tried: int | None = None  # the length at which it was compacted

    def compact(self) -> bool:
        if self.length % self.cache.options.every == 0 and self.tried == self.length:
            self.boundary = self.length
            return True
        self.tried = self.length
        return super().compact()


class HastyCompaction(CompressedCache):
    interface_version = 3
    sequence_type = HastySequence


# ---------------------------------------------------------------- memory
class LeakingSequence(SingleBlockSequence):
    """A sequence that keeps its block if it was never used."""

    def close(self) -> None:
        if self.length:
            super().close()
        else:
            self.leave()


class Leak(SoundCache):
    sequence_type = LeakingSequence

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


class GrowingSequence(StreamingSequence):
    """A sequence that takes a block at each boundary, and frees none before its end."""

    def compact(self) -> bool:
        has_dropped = super().compact()
        if has_dropped and isinstance(self.cache, GrowsForever):
            self.cache.taken += self.cache.memory.regions[0].allocate() or ()
        return has_dropped

    def close(self) -> None:
        super().close()
        while isinstance(self.cache, GrowsForever) and self.cache.taken:
            self.cache.memory.regions[0].release([self.cache.taken.pop()])


class GrowsForever(StreamingCache):
    interface_version = 3
    sequence_type = GrowingSequence

    def __init__(self, setup: CacheSetup, options: StreamingOptions) -> None:
        super().__init__(setup, options)
        self.taken: list[int] = []


class EndlessSequence(WindowSequence):
    def reserve(self, num_tokens: int) -> bool:
        return True


class EndlessWindow(SlidingWindowCache):
    """A window that lets texts go on, and counts positions in the text."""

    interface_version = 3
    sequence_type = EndlessSequence

    def __init__(self, setup: CacheSetup, options: WindowOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(unbounded=True)


class WritesElsewhere(SoundCache):
    """Computes all layers by a hook, and writes into blocks that are not its own."""

    _whole: Sequence[KVLocation | None]

    def locate(self, rows: Rows[SingleBlockSequence]) -> Locations:
        self._whole = super().locate(rows).by_layer
        return Locations([None] * len(self._whole))

    def attend(self, layer: int, rows: Rows[SingleBlockSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        location, spec = self._whole[layer], self.setup.geometry.layers[layer]
        assert location is not None
        self.setup.ops.write_kv(location.store, layer, k, v, location.at)
        self.setup.ops.attend(out, q, location.store, layer, location.at, spec, window=location.window)
        region = self.region
        region.memory[region.page_bytes - 1 :: region.page_bytes] = layer + rows.sequences[0].length % 100


class WrongUsage(SoundCache):
    def usage(self) -> CacheUsage:
        return super().usage()._replace(wasted=0)


class SaltBlind(PagedCache):
    """Finds what was computed under any salt."""

    interface_version = 3

    def open(self, text: Text) -> PagedSequence | None:
        return super().open(text._replace(salt=NO_SALT))


class ParentsLast(PagedCache):
    """Lists children before their parents."""

    interface_version = 3

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        prefixes, omitted = super().list_prefixes(limit)
        return prefixes[::-1], omitted


class LosesHits(PagedCache):
    """Counts a hit with the longest prefix that was found, and with no prefix of it."""

    interface_version = 3

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        prefixes, omitted = super().list_prefixes(limit)
        parents = {each.parent for each in prefixes}
        return [each._replace(hits=int(each.id not in parents)) for each in prefixes], omitted


class DropsNothing(PagedCache):
    """Keeps what an operator wants to be dropped."""

    interface_version = 3

    def drop_prefix(self, prefix_id: str) -> int | None:
        return 0


class KnowsAllBlocks(SoundCache):
    """Describes blocks that it does not hold."""

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        return BlockInfo(None, None, 0, 0)


class WrongIdleBytes(ContiguousCache):
    """Says that nothing can be freed."""

    interface_version = 3
    idle_bytes = 0  # type: ignore[assignment]


class EvictsTooLittle(PagedCache):
    """Frees one block, however many bytes are asked for."""

    interface_version = 3

    def evict(self, num_bytes: int) -> int:
        return super().evict(1)


# ---------------------------------------------------------------- calls
class WordySequence(SingleBlockSequence):
    def reserve(self, num_tokens: int) -> bool:
        return "yes"  # type: ignore[return-value]


class WrongType(SoundCache):
    sequence_type = WordySequence


class RaisesWhenFull(SoundCache):
    """Has no answer when there is no memory."""

    def allocate_sequence(self, length: int) -> SingleBlockSequence | None:
        allocated = super().allocate_sequence(length)
        assert allocated is not None, "no memory left"
        return allocated


class OldVersion(SoundCache):
    interface_version = 1


class NotFinished(KVCache):
    interface_version = 3

    def open(self, text: Text) -> KVSequence | None:
        return None


class WindowTooWide(SlidingWindowCache):
    """Drops nothing in the texts of the checks, with the only options that it is checked with."""

    interface_version = 3
