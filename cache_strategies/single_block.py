"""The base class of caches with one block per seat, allocated when the seat opens and freed when it closes.

The strategies contiguous and sliding_window are subclasses. A block has all the slots that its seat ever uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache_strategies.block_table import BlockTableCache, TableSeat, TableSeatT, resolve_kv_dtype
from cache_strategies.types import NO_SALT, Blocks, CacheUsage, Geometry, Salt, Sizes
from kernels.store import KVStore, compute_block_bytes


class SingleBlockCache(BlockTableCache[TableSeatT]):
    """A cache with one block per seat. A subclass sets the block's size, and max_row and rewind of its contract."""

    seat_type: type[TableSeatT] = TableSeat  # type: ignore[assignment]  # default; a subclass may set its own

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        tokens, _ = cls.block_layout(options, geometry)
        size = compute_block_bytes(geometry.layers, tokens, resolve_kv_dtype(options, geometry))
        return Sizes([size], lambda num_tokens: [1])

    def make_stores(self, parts: Sequence[Sequence[int]], block_size: int, dtype: torch.dtype) -> list[KVStore]:
        self.region, store = self.make_store(parts[0], block_size, dtype)
        return [store]

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> TableSeatT | None:
        return self._allocate_seat(length=0)

    def _allocate_seat(self, length: int) -> TableSeatT | None:
        """Return a seat of `length` tokens with a newly allocated block; None if there is not enough memory."""
        blocks = None if self.table.is_full else self.region.allocate()
        return None if blocks is None else self._make_seat(blocks[0], length)

    def _make_seat(self, block: int, length: int) -> TableSeatT:
        seat = self.seat_type(self.table.allocate_row(), [block], length)
        if type(self).grow is SingleBlockCache.grow:  # else a subclass has something to do for each row
            seat.room = self.setup.geometry.max_seq_len
        self.table.write(seat)
        self.seats.add(seat)
        return seat

    def grow(self, seat: TableSeatT, num_tokens: int) -> bool:
        assert num_tokens <= (self.contract.max_row or num_tokens), "a row must not be longer than contract.max_row"
        assert seat.length + num_tokens <= self.setup.geometry.max_seq_len
        return True

    def fork(self, seat: TableSeatT) -> TableSeatT | None:
        child = self._allocate_seat(seat.length)
        if child is not None:
            child.cached = seat.cached
            self.setup.ops.copy_blocks(self.store, seat.blocks, child.blocks)
        return child

    def close(self, seat: TableSeatT) -> None:
        self.seats.remove(seat)
        self.table.release_row(seat.index)
        self.region.release([seat.blocks.pop()])

    def usage(self) -> CacheUsage:
        tokens = sum(seat.length for seat in self.seats)
        kept = sum(min(seat.num_kept, self.store.block_size) for seat in self.seats)
        reserved, used = len(self.seats) * self.region.size, kept * self.store.block_bytes // self.store.block_size
        return CacheUsage(len(self.seats), tokens, reserved, used, 0, reserved - used, self.setup.memory.limit_bytes)

    def blocks(self) -> Blocks:
        return Blocks(in_use=len(self.seats))

    def check_integrity(self) -> None:
        blocks = [seat.blocks[0] for seat in self.seats]
        assert len(set(blocks)) == len(blocks)
        assert self.region.num_held == len(blocks)
        assert len({seat.index for seat in self.seats}) == len(self.seats)
        assert all(0 <= seat.length <= self.setup.geometry.max_seq_len for seat in self.seats)
