"""Address ranges take memory of the system as their blocks are used, keep it, and pass it on to other ranges."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import pytest
import torch

from cache_strategies.address_ranges import LARGE_BLOCK, SYSTEM_PAGE, AddressRange, AddressRanges, can_reserve_addresses

pytestmark = pytest.mark.skipif(not can_reserve_addresses(), reason="this system does not reserve addresses")

MIB = 1 << 20
PLENTY = 1 << 62


def ranges_of(total_bytes: int, free: int = PLENTY) -> AddressRanges:
    return AddressRanges(total_bytes, "cpu", lambda: free)


def count_resident(placed: AddressRange) -> int:
    """Return how many bytes of a range are in memory, as mincore(2) counts the pages of the system."""
    size = placed.memory.nbytes
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(placed.memory.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


@pytest.fixture
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system provide no huge pages, so that it is seen which bytes were touched."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)


small_pages = pytest.mark.usefixtures("_small_pages")


# ---------------------------------------------------------------- sizes
def test_blocks_take_whole_cache_lines_and_large_ones_whole_pages() -> None:
    round_block = AddressRanges.round_block
    assert [round_block(size) for size in (1, 64, 65, 5000)] == [64, 64, 128, 5056]
    assert round_block(LARGE_BLOCK) == LARGE_BLOCK
    assert round_block(LARGE_BLOCK + 1) == LARGE_BLOCK + SYSTEM_PAGE
    assert all(round_block(size) <= 1.07 * size for size in range(LARGE_BLOCK, 4 * LARGE_BLOCK, 999))


def test_every_range_has_addresses_for_all_memory() -> None:
    ranges = ranges_of(MIB)
    for size in (64, 192, SYSTEM_PAGE, LARGE_BLOCK, MIB):
        placed = ranges.place(size)
        assert placed.pages >= MIB // size
        assert placed.memory.shape == (placed.pages * size,)
        assert placed.memory.dtype is torch.uint8
        blocks = placed.take(MIB // size)
        assert sorted(blocks) == placed.list_used() == [*range(MIB // size)]
        placed.give(blocks)
    assert ranges.warm_bytes == MIB


# ---------------------------------------------------------------- memory comes as it is used
@small_pages
def test_only_the_memory_of_used_blocks_is_taken() -> None:
    ranges = ranges_of(64 * MIB)
    first, second = ranges.place(MIB), ranges.place(2 * MIB)
    assert (count_resident(first), count_resident(second), ranges.warm_bytes) == (0, 0, 0)
    blocks = first.take(3)
    second.take(1)
    assert (count_resident(first), count_resident(second)) == (3 * MIB, 2 * MIB)
    assert ranges.warm_bytes == 5 * MIB
    for block in blocks:
        first.memory[block * MIB : (block + 1) * MIB] = 1
    assert count_resident(first) == 3 * MIB, "writing took memory"


@small_pages
def test_freed_memory_stays_warm_and_is_used_first() -> None:
    ranges = ranges_of(64 * MIB)
    placed = ranges.place(MIB)
    blocks = placed.take(4)
    placed.memory.view(-1, MIB)[blocks] = 7
    placed.give([blocks[2], blocks[1]])
    assert (count_resident(placed), ranges.warm_bytes) == (4 * MIB, 4 * MIB)
    assert placed.take(3) == [1, 2, 4], "the lowest first"
    assert placed.memory[MIB] == 7, "what was in a block is still there"
    assert ranges.warm_bytes == 5 * MIB


@small_pages
def test_memory_moves_between_ranges_within_the_total() -> None:
    ranges = ranges_of(8 * MIB)
    small, large = ranges.place(MIB), ranges.place(3 * MIB)
    blocks = small.take(8)
    small.memory.fill_(5)
    assert count_resident(small) == 8 * MIB
    small.give([3, 1, 0, 7])  # chunks that have been unused for the longest time go first
    (block,) = large.take(1)
    assert ranges.warm_bytes == count_resident(small) + count_resident(large) == 8 * MIB
    assert [int(small.memory[n * MIB]) for n in blocks] == [0, 0, 5, 0, 5, 5, 5, 5], "what went reads as zeros"
    assert small.take(1) == [7], "the one that is warm"
    large.give([block])
    assert small.take(3) == [0, 1, 3]
    assert ranges.warm_bytes == count_resident(small) + count_resident(large) == 8 * MIB
    assert count_resident(large) == 0


@small_pages
def test_small_blocks_share_chunks_of_whole_pages() -> None:
    ranges = ranges_of(MIB)
    placed = ranges.place(192)  # 64 of them fill three pages
    assert placed.chunk_bytes == 3 * SYSTEM_PAGE
    blocks = placed.take(64)
    assert blocks == [*range(64)]
    assert count_resident(placed) == ranges.warm_bytes == 3 * SYSTEM_PAGE
    blocks += placed.take(1)
    assert count_resident(placed) == ranges.warm_bytes == 6 * SYSTEM_PAGE
    other = ranges.place(MIB - 6 * SYSTEM_PAGE)
    (last,) = other.take(1)
    other.give([last])
    placed.give(blocks[1:])  # a chunk with a block in use stays
    (same,) = other.take(1)
    assert (same, count_resident(placed)) == (last, 6 * SYSTEM_PAGE)
    another = ranges.place(3 * SYSTEM_PAGE)
    another.take(1)
    assert (placed.list_used(), count_resident(placed)) == ([0], 3 * SYSTEM_PAGE), "the other chunk went"


def test_a_range_that_is_closed_gives_its_memory_back() -> None:
    ranges = ranges_of(8 * MIB)
    placed, other = ranges.place(MIB), ranges.place(MIB)
    placed.give(placed.take(5))
    other.take(2)
    placed.close()
    assert ranges.warm_bytes == 2 * MIB
    assert other.take(6) == [2, 3, 4, 5, 6, 7]


@small_pages
def test_warming_up_takes_all_memory_which_moves_where_it_is_needed() -> None:
    ranges = ranges_of(8 * MIB)
    first, second = ranges.place(MIB), ranges.place(2 * MIB)
    ranges.warm_up(3 * MIB)
    assert ranges.warm_bytes == 3 * MIB
    ranges.warm_up(8 * MIB)
    assert ranges.warm_bytes == count_resident(first) + count_resident(second) == 8 * MIB
    assert (first.num_used, second.num_used) == (0, 0)
    assert len(second.take(4)) == 4
    assert (count_resident(first), count_resident(second)) == (0, 8 * MIB)


# ---------------------------------------------------------------- books
@pytest.mark.parametrize("size", [64, SYSTEM_PAGE, MIB])
def test_a_block_that_is_not_in_use_is_not_taken_back(size: int) -> None:
    placed = ranges_of(8 * MIB).place(size)
    blocks = placed.take(2)
    placed.give(blocks[:1])
    for wrong in (blocks[0], -1, placed.pages - 1, placed.pages):
        with pytest.raises(ValueError, match=f"block {wrong} is not allocated: was it released before"):
            placed.give([wrong])
    assert (placed.list_used(), placed.num_used) == ([blocks[1]], 1)


# ---------------------------------------------------------------- a system without memory
KEPT_FREE = 4 * MIB  # bytes that are left to other programs, for a memory of 64 MiB


def test_memory_that_the_system_does_not_have_is_not_taken() -> None:
    free = [KEPT_FREE + 3 * MIB]
    ranges = AddressRanges(64 * MIB, "cpu", lambda: free[0])
    placed = ranges.place(MIB)
    assert len(placed.take(3)) == 3
    free[0] = KEPT_FREE
    with pytest.raises(MemoryError, match="the system has no"):
        placed.take(2)
    assert (placed.num_used, ranges.warm_bytes) == (3, 3 * MIB)
    assert not ranges.can_grow()
    free[0] = PLENTY
    assert ranges.can_grow()
    assert sorted(placed.take(2)) == [3, 4], "no number is lost"


def test_a_range_takes_unused_memory_of_others_before_it_gives_up() -> None:
    free = [KEPT_FREE + 4 * MIB]
    ranges = AddressRanges(64 * MIB, "cpu", lambda: free[0])
    small, large = ranges.place(MIB), ranges.place(2 * MIB)
    small.give(small.take(4))
    free[0] = 0
    assert len(large.take(2)) == 2
    assert ranges.warm_bytes == 4 * MIB
    with pytest.raises(MemoryError):
        small.take(1)


def test_a_part_of_what_cannot_be_taken_is_given_back() -> None:
    free = [KEPT_FREE + 3 * MIB]
    ranges = AddressRanges(64 * MIB, "cpu", lambda: free[0])
    placed = ranges.place(MIB)
    placed.take(1)
    free[0] = 0
    with pytest.raises(MemoryError):
        placed.take(5)
    assert (placed.num_used, ranges.warm_bytes) == (1, 3 * MIB)


def test_writing_to_all_blocks_of_a_large_range_needs_no_more_than_the_total() -> None:
    code = f"""
import psutil
from cache_strategies.memory import make_memory
memory = make_memory({64 * MIB})
regions = [memory.add_instance(name).region({MIB}) for name in "abcd"]
before = psutil.Process().memory_info().rss
for _ in range(3):
    for region in regions:
        blocks = region.allocate(64)
        for block in blocks:
            region.memory[block * {MIB}:][:{MIB}] = 1
        region.release(blocks)
print(psutil.Process().memory_info().rss - before < {80 * MIB})
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_what_is_noted_of_unused_blocks_does_not_grow_as_memory_moves_to_and_fro() -> None:
    ranges = AddressRanges(1 << 20, "cpu", lambda: 1 << 60)
    small, large = ranges.place(64), ranges.place(1 << 20)
    for _ in range(50):
        small.give(small.take(1))
        large.give(large.take(1))
    assert len(small._cold_blocks) + len(small._warm_blocks) <= 2 * 64
