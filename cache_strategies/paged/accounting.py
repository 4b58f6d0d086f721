"""Counts the blocks and the memory of a paged cache by use. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import mul

from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.types import Blocks, CacheUsage


class Accounting:
    """Counts blocks of several groups of layers, whose tokens take different numbers of bytes."""

    def __init__(self, pool: BlockPool, block_size: int, bytes_per_token: Sequence[float]) -> None:
        """Make an object that counts; `bytes_per_token` has the bytes of a token in the layers of each group."""
        self._pool = pool
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token

    def count_usage(self, seats: Iterable[PagedSeat], pinned: Iterable[int], reserved: int, limit: int) -> CacheUsage:
        """Return the memory by use; `reserved` are the bytes of all blocks. Idle blocks count in full, with padding."""
        filled, num_seats = Counter[int](), 0
        for seat in seats:
            num_seats += 1
            for i, block in iter_blocks(seat):
                filled[block] = max(filled[block], min(max(seat.length - i * self._block_size, 0), self._block_size))
        tokens = self._count_tokens(filled)[0]
        used = self._count_bytes(self._count_tokens(filled | Counter(dict.fromkeys(pinned, self._block_size))))
        idle = self._pool.idle_bytes
        return CacheUsage(num_seats, tokens, reserved, used, idle, reserved - used - idle, limit)

    def _count_tokens(self, filled: Mapping[int, int]) -> Sequence[int]:
        """Return the number of tokens in blocks, by group; `filled` has the number in each block."""
        counts = [0] * len(self._bytes_per_token)
        for block, n in filled.items():
            counts[self._pool.group(block)] += n
        return counts

    def _count_bytes(self, tokens: Sequence[int]) -> int:
        """Return the bytes of numbers of tokens, given by group."""
        return int(sum(map(mul, tokens, self._bytes_per_token)))

    def count_blocks(self, seats: Iterable[PagedSeat], pinned: Collection[int], pending: int) -> Blocks:
        """Return the numbers of blocks by state, without those that take no memory."""
        references = Counter(block for seat in seats for _, block in iter_blocks(seat) if self._pool.pages(block))
        return Blocks(
            in_use=len(references),
            shared=sum(1 for n in references.values() if n > 1),
            pending=pending,
            pinned=len(pinned),
            idle=self._pool.num_idle,
        )


def iter_blocks(seat: PagedSeat) -> Iterator[tuple[int, int]]:
    """Yield (position, block) of all blocks that a seat holds, in all groups of layers."""
    yield from enumerate(seat.blocks)
    for held in seat.windowed:
        yield from held.items()
