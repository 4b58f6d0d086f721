"""Places regions in address ranges of their own, which get memory from the operating system as blocks are used.

Each range is as long as all memory together, and only its blocks in use take some. Blocks that were freed stay warm:
their memory stays, and is used again first. It goes back to the system when another range needs the bytes, the memory
that has been unused for the longest time first. So nothing is copied, and blocks of any sizes can follow each other.

Memory is taken in chunks: a block, or as many small ones as fill whole pages of the system. It is touched before it is
used, if the system has enough of it, so that no later write can fail. Linux only.
"""

from __future__ import annotations

import errno
import mmap
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from heapq import heappop, heappush
from math import gcd

import psutil
import torch

from kernels.store import ALIGN

SYSTEM_PAGE = 4096  # bytes of the smallest page of the system
LARGE_BLOCK = 1 << 16  # bytes of a block from which on it takes whole pages of the system, at most 6 % more
CHECK_INTERVAL_BYTES = 64 << 20  # bytes that are taken between two looks at the free memory
MIN_FREE_BYTES = 64 << 20  # bytes of the machine's free memory that are left to other programs; less in a small memory
PROBED_BYTES = 1 << 40  # bytes of addresses that are reserved to see whether the system lets programs do so
# Constants that older versions of Python's mmap do not have
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
MADV_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)


def _align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def can_reserve_addresses() -> bool:
    """Return whether addresses can be reserved without memory here.

    Linux does so, but with vm.overcommit_memory=2 or if a process may use some addresses only (ulimit -v).
    """
    try:
        _reserve(PROBED_BYTES).close()
    except OSError:
        return False
    return True


def read_available_memory() -> int:
    """Return the bytes that the system can provide without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def _reserve(num_bytes: int) -> mmap.mmap:
    """Reserve addresses for a number of bytes, which read as zeros. Raises OSError if the system refuses."""
    if sys.platform != "linux":
        raise OSError("only Linux can reserve addresses without memory")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    with suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class AddressRanges:
    """The address ranges of all regions, and the memory that they have taken from the system."""

    def __init__(
        self,
        total_bytes: int,
        device: torch.device | str = "cpu",
        get_free_memory: Callable[[], int] = read_available_memory,
    ) -> None:
        """Let the ranges take up to `total_bytes` bytes, as long as `get_free_memory` returns enough free bytes."""
        self.device = torch.device(device)
        self.total_bytes = total_bytes
        self.warm_bytes = 0
        self._ranges: list[AddressRange] = []
        self._get_free_memory = get_free_memory
        self._least_free = min(MIN_FREE_BYTES, total_bytes // 16)
        self._allowed = 0  # bytes that may be taken before the next look at the free memory
        # Chunks that have memory and no block in use, those that have been unused for the longest time first
        self._unused: OrderedDict[tuple[AddressRange, int], None] = OrderedDict()

    @staticmethod
    def round_block(block_bytes: int) -> int:
        """Return the bytes that a block takes: whole cache lines, or whole pages of the system if it is large."""
        return _align(block_bytes, SYSTEM_PAGE if block_bytes >= LARGE_BLOCK else ALIGN)

    def place(self, block_bytes: int) -> AddressRange:
        """Return a new range for blocks of a size. Raises OSError if the system refuses the addresses."""
        size = self.round_block(block_bytes)
        placed = AddressRange(self, size, max(1, self.total_bytes // size))
        self._ranges.append(placed)
        return placed

    def remove(self, placed: AddressRange) -> None:
        """Forget a range, whose memory was given back."""
        self._ranges.remove(placed)

    def count_usable_bytes(self, block_bytes: int, pinned: object) -> int:
        """Return more bytes than there can be, as blocks of one range never divide another."""
        return 1 << 62

    # ---------------------------------------------------------------- memory of the system
    def warm(self, placed: AddressRange, chunk: int) -> None:
        """Take the memory of a chunk from the system. Raises MemoryError if there is not enough."""
        size = placed.chunk_bytes
        while self.warm_bytes + size > self.total_bytes and self._unused:
            self._cool_one()
        if self._allowed < size:
            spare = max(0, self._get_free_memory() - self._least_free)
            self._allowed = min(max(CHECK_INTERVAL_BYTES, size), spare)
        if self._allowed < size and self._allowed + sum(unused.chunk_bytes for unused, _ in self._unused) < size:
            raise MemoryError(f"the system has no {size} bytes of memory for a block")
        while self._allowed < size:
            self._cool_one()
        while True:
            try:
                placed.touch(chunk)
                break
            except MemoryError:  # although some seemed to be free
                if not self._unused:
                    raise
                self._cool_one()
        self.warm_bytes += size
        self._allowed -= size

    def _cool_one(self) -> None:
        """Give back the memory of the chunk that has been unused for the longest time."""
        (placed, chunk), _ = self._unused.popitem(last=False)
        self.give_back(placed, chunk)

    def give_back(self, placed: AddressRange, chunk: int) -> None:
        """Give the memory of a chunk back to the system."""
        placed.cool(chunk)
        self.warm_bytes -= placed.chunk_bytes
        self._allowed += placed.chunk_bytes

    def mark_unused(self, placed: AddressRange, chunk: int) -> None:
        """Note that no block of a chunk is in use any more."""
        self._unused[placed, chunk] = None

    def mark_used(self, placed: AddressRange, chunk: int) -> None:
        """Note that a block of a chunk, which has memory, is in use again."""
        del self._unused[placed, chunk]

    def forget_unused(self, placed: AddressRange) -> None:
        """Give back the memory of all unused chunks of a range."""
        for each in [each for each in self._unused if each[0] is placed]:
            del self._unused[each]
            self.give_back(*each)

    def can_grow(self) -> bool:
        """Return whether the system has memory for some more blocks."""
        return self._get_free_memory() >= self._least_free + min(CHECK_INTERVAL_BYTES, self.total_bytes)

    def warm_up(self, num_bytes: int) -> None:
        """Take memory until there are so many bytes, for the first blocks of the first ranges.

        Raises MemoryError if there is not enough.
        """
        for placed in self._ranges:
            while self.warm_bytes < num_bytes and placed.warm_next():
                pass


class AddressRange:
    """The blocks of one region, in a range of addresses."""

    def __init__(self, ranges: AddressRanges, size: int, num_blocks: int) -> None:
        """Reserve addresses for blocks of `size` bytes. Raises OSError if the system refuses."""
        self.page_bytes = size
        self._chunk_blocks = SYSTEM_PAGE // gcd(size, SYSTEM_PAGE)  # blocks that fill whole pages of the system
        self.chunk_bytes = size * self._chunk_blocks
        self.pages = _align(num_blocks, self._chunk_blocks)
        self._mapping = _reserve(self.pages * size)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.num_used = 0
        self.extent = 0  # number of blocks up to the last one that was ever used
        self._ranges = ranges
        # Of the blocks before `extent`
        self._is_used = bytearray()
        self._is_warm = bytearray()  # by chunk
        self._used_by_chunk = array("i")  # number of its blocks in use
        # Numbers of unused blocks, lowest first; some may be in use or have lost their memory since
        self._warm_blocks: list[int] = []
        self._cold_blocks: list[int] = []  # the first one of each chunk without memory

    def take(self, count: int) -> list[int]:
        """Return unused blocks, which are in use now. Raises MemoryError if the system has not enough memory."""
        blocks: list[int] = []
        try:
            while len(blocks) < count:
                blocks.append(self._take_one())
        except MemoryError:
            self.give(blocks)
            raise
        return blocks

    def _take_one(self) -> int:
        block = self._choose()
        chunk = block // self._chunk_blocks
        if not self._is_warm[chunk]:
            try:
                self._ranges.warm(self, chunk)
            except MemoryError:
                heappush(self._cold_blocks, block)
                raise
            self._set_warm(chunk)
        elif not self._used_by_chunk[chunk]:
            self._ranges.mark_used(self, chunk)
        self._is_used[block] = True
        self._used_by_chunk[chunk] += 1
        self.num_used += 1
        return block

    def _choose(self) -> int:
        """Return the lowest unused block, if possible one with memory."""
        for blocks, is_warm in ((self._warm_blocks, True), (self._cold_blocks, False)):
            while blocks:
                block = heappop(blocks)
                if not self._is_used[block] and bool(self._is_warm[block // self._chunk_blocks]) is is_warm:
                    return block
        return self._extend()

    def _extend(self) -> int:
        """Return the first block of a chunk that was never used; its others are unused."""
        first = self.extent
        assert first < self.pages, "a region is not larger than all memory"
        self.extent += self._chunk_blocks
        self._is_used += bytes(self._chunk_blocks)
        self._is_warm.append(False)
        self._used_by_chunk.append(0)
        return first

    def _set_warm(self, chunk: int) -> None:
        """Note that a chunk has memory, of which no block is in use yet."""
        self._is_warm[chunk] = True
        first = chunk * self._chunk_blocks
        for block in range(first, first + self._chunk_blocks):
            heappush(self._warm_blocks, block)

    def give(self, blocks: Iterable[int]) -> None:
        """Take back blocks, whose memory stays. Raises ValueError for one that is not in use."""
        for block in blocks:
            if not 0 <= block < self.extent or not self._is_used[block]:
                raise ValueError(f"block {block} is not allocated: was it released before?")
            self._is_used[block] = False
            chunk = block // self._chunk_blocks
            self._used_by_chunk[chunk] -= 1
            self.num_used -= 1
            heappush(self._warm_blocks, block)
            if not self._used_by_chunk[chunk]:
                self._ranges.mark_unused(self, chunk)

    def list_used(self) -> list[int]:
        """Return the numbers of all blocks in use, ascending."""
        return [block for block, is_used in enumerate(self._is_used) if is_used]

    def close(self) -> None:
        """Give back all memory. No block is in use any more."""
        self._ranges.forget_unused(self)
        self._ranges.remove(self)

    # ---------------------------------------------------------------- memory of the system
    def touch(self, chunk: int) -> None:
        """Let the system provide the memory of a chunk. Raises MemoryError if it has not enough."""
        first = chunk * self.chunk_bytes
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE, first, self.chunk_bytes)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EFAULT):
                raise MemoryError(str(error)) from None
            self.memory[first : first + self.chunk_bytes : SYSTEM_PAGE] = 0  # a system that does not know the advice

    def cool(self, chunk: int) -> None:
        """Give the memory of a chunk back to the system; its blocks read as zeros."""
        self._is_warm[chunk] = False
        self._mapping.madvise(mmap.MADV_DONTNEED, chunk * self.chunk_bytes, self.chunk_bytes)
        heappush(self._cold_blocks, chunk * self._chunk_blocks)

    def warm_next(self) -> bool:
        """Take the memory of a chunk that was never used; return whether there was one."""
        if self.extent >= self.pages:
            return False
        chunk = self._extend() // self._chunk_blocks
        self._ranges.warm(self, chunk)
        self._set_warm(chunk)
        self._ranges.mark_unused(self, chunk)
        return True
