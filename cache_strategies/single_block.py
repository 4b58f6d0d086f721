"""The base classes of caches with one block per sequence, allocated when it opens and freed when it closes.

The strategies contiguous and sliding_window are subclasses. A block has all the slots that its sequence ever uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from cache_strategies.block_table import BlockTableCache, TableSequence, TableSequenceT, resolve_kv_formats
from cache_strategies.types import Blocks, CacheUsage, Geometry, Sizes, Text
from kernels.kv_formats import KVFormats
from kernels.store import KVStore, compute_block_bytes


class SingleBlockSequence(TableSequence):
    """A sequence with one block of its cache."""

    cache: SingleBlockCache[Any]

    def __init__(self, cache: SingleBlockCache[Any], block: int, length: int = 0) -> None:
        super().__init__(cache.table.allocate_row(), [block], length)
        self.cache = cache
        self.room = cache.setup.geometry.max_seq_len
        self._set_stop()
        cache.table.write(self)
        cache.sequences.add(self)

    def reserve(self, num_tokens: int) -> bool:
        end = self.length + num_tokens
        assert end <= self.cache.setup.geometry.max_seq_len
        assert self.stop is None or end <= self.stop, "a row must end at `stop`"
        return True

    def commit(self, ids: Sequence[int]) -> None:
        self.length += len(ids)
        self._set_stop()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._set_stop()

    def _set_stop(self) -> None:
        if self.cache.max_row is not None:
            self.stop = self.length + self.cache.max_row

    def fork(self) -> Self | None:
        child = self.cache.allocate_sequence(self.length)
        if child is None:
            return None
        child.found = self.found
        self.cache.setup.ops.copy_blocks(self.cache.store, self.blocks, child.blocks)
        assert isinstance(child, type(self))
        return child

    def close(self) -> None:
        self.cache.region.release([self.leave()])

    def leave(self) -> int:
        """Leave the cache; return the block, which stays allocated."""
        self.cache.sequences.remove(self)
        self.cache.table.release_row(self.index)
        return self.blocks.pop()


class SingleBlockCache(BlockTableCache[TableSequenceT]):
    """A cache with one block per sequence. A subclass sets the block's size, and how long rows may be."""

    sequence_type: type[TableSequenceT] = SingleBlockSequence  # type: ignore[assignment]  # a subclass may set its own
    max_row: int | None = None  # most tokens of a row; None: any number

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        tokens, _ = cls.block_layout(options, geometry)
        size = compute_block_bytes(geometry.layers, tokens, resolve_kv_formats(options, geometry))
        return Sizes([size], lambda num_tokens: [1])

    def make_stores(self, parts: Sequence[Sequence[int]], block_size: int, formats: KVFormats) -> list[KVStore]:
        self.region, store = self.make_store(parts[0], block_size, formats)
        return [store]

    def open(self, text: Text) -> TableSequenceT | None:
        return self.allocate_sequence(length=0)

    def allocate_sequence(self, length: int) -> TableSequenceT | None:
        """Return a sequence of `length` tokens with a newly allocated block; None if there is not enough memory."""
        blocks = None if self.table.is_full else self.region.allocate()
        return None if blocks is None else self.make_sequence(blocks[0], length)

    def make_sequence(self, block: int, length: int) -> TableSequenceT:
        """Return a sequence of `length` tokens, which are in a block already."""
        make: Any = self.sequence_type
        made: TableSequenceT = make(self, block, length)
        return made

    def usage(self) -> CacheUsage:
        tokens = sum(each.length for each in self.sequences)
        kept = sum(min(each.num_kept, self.store.block_size) for each in self.sequences)
        reserved, used = len(self.sequences) * self.region.size, kept * self.store.block_bytes // self.store.block_size
        limit = self.setup.memory.limit_bytes
        return CacheUsage(len(self.sequences), tokens, reserved, used, 0, reserved - used, limit)

    def blocks(self) -> Blocks:
        return Blocks(in_use=len(self.sequences))

    def check_integrity(self) -> None:
        blocks = [each.blocks[0] for each in self.sequences]
        assert len(set(blocks)) == len(blocks)
        assert self.region.num_held == len(blocks)
        assert len({each.index for each in self.sequences}) == len(self.sequences)
        assert all(0 <= each.length <= self.setup.geometry.max_seq_len for each in self.sequences)
