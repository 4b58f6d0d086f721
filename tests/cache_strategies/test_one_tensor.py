"""In one tensor blocks are runs of pages, which may lie scattered; pinned ones divide what is left."""

from __future__ import annotations

import pytest
import torch

from cache_strategies.one_tensor import LARGE_BLOCK, PAGE_BYTES, OneTensor
from cache_strategies.spaces import PinnedBlocks


def tensor_of(pages: int) -> OneTensor:
    return OneTensor(pages * PAGE_BYTES, "cpu")


def test_the_tensor_is_there_from_the_start_and_zeros() -> None:
    space = tensor_of(5)
    assert space.memory.shape == (5 * PAGE_BYTES,)
    assert space.memory.dtype is torch.uint8
    assert not space.memory.any()
    assert space.warm_bytes == 5 * PAGE_BYTES
    assert not space.can_grow()


def test_regions_share_the_tensor_and_have_objects_of_their_own() -> None:
    space = tensor_of(5)
    first, second = space.place(1), space.place(PAGE_BYTES + 1)
    assert first.memory is not second.memory
    assert first.memory.data_ptr() == second.memory.data_ptr() == space.memory.data_ptr()
    assert (first.run, second.run) == (1, 2)
    assert (second.pages, second.extent, second.page_bytes) == (5, 5, PAGE_BYTES)


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2), (10 * PAGE_BYTES, 10)])
def test_a_block_takes_whole_pages(size: int, pages: int) -> None:
    assert OneTensor.round_block(size) == pages * PAGE_BYTES


def test_small_blocks_come_from_below_and_large_ones_from_above() -> None:
    run = LARGE_BLOCK // PAGE_BYTES
    space = tensor_of(3 * run)
    small, large = space.place(2 * PAGE_BYTES), space.place(LARGE_BLOCK)
    assert small.take(2) == [0, 2]
    assert large.take(2) == [2 * run, run]
    assert small.take(1) == [4]
    assert large.take(1) is None
    small.give([2])
    assert small.take(1) == [2]


def test_a_run_needs_pages_side_by_side() -> None:
    space = tensor_of(6)
    single, pair = space.place(PAGE_BYTES), space.place(2 * PAGE_BYTES)
    assert single.take(6) == [0, 1, 2, 3, 4, 5]
    single.give([0, 2, 4])
    assert pair.take(1) is None
    single.give([1])
    assert pair.take(1) == [0]
    single.give([3])
    assert pair.take(2) is None, "all or none"
    assert pair.list_used() == [0]
    assert pair.take(1) == [2]


def test_a_block_that_is_not_in_use_is_not_taken_back() -> None:
    space = tensor_of(6)
    pair, other = space.place(2 * PAGE_BYTES), space.place(2 * PAGE_BYTES)
    assert pair.take(1) == [0]
    for wrong in (1, -1, 2, 9):
        with pytest.raises(ValueError, match=f"block {wrong} is not allocated: was it released before"):
            pair.give([wrong])
    with pytest.raises(ValueError, match="block 0 is not allocated"):
        other.give([0])
    assert (pair.num_used, pair.list_used()) == (1, [0])


def test_pinned_blocks_divide_what_is_left() -> None:
    space, size = tensor_of(10), 3 * PAGE_BYTES
    assert space.count_usable_bytes(size, []) == 9 * PAGE_BYTES
    assert space.count_usable_bytes(size, [PinnedBlocks([0], 1)]) == 9 * PAGE_BYTES
    assert space.count_usable_bytes(size, [PinnedBlocks([1], 1)]) == 6 * PAGE_BYTES
    assert space.count_usable_bytes(size, [PinnedBlocks([2, 5], 1), PinnedBlocks([7], 3)]) == 0
    assert space.count_usable_bytes(PAGE_BYTES, [PinnedBlocks([2, 5], 1), PinnedBlocks([7], 3)]) == 5 * PAGE_BYTES
