"""The addresses of K and V of a layer: disjoint, aligned, within their block, and computed in 64 bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.store import ALIGN, KVStore, Pages, compute_block_bytes, compute_plane_offsets
from kernels.types import LayerSpec

PHI4_STORED = [LayerSpec(10, 40, 128, 128)] * 40
PHI4_REPEATED = [LayerSpec(40, 40, 128, 128)] * 40
ODD = [LayerSpec(3, 6, 5, 7), LayerSpec(1, 1, 9, 3), LayerSpec(2, 2, 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_planes_are_aligned_and_do_not_overlap(block_size: int, dtype: torch.dtype) -> None:
    offsets = compute_plane_offsets(ODD, block_size, dtype)
    sizes = [
        spec.num_kv_heads * block_size * d * dtype.itemsize for spec in ODD for d in (spec.head_dim, spec.v_head_dim)
    ]
    assert all(offset % ALIGN == 0 for offset in offsets)
    for (start, end), size in zip(pairwise(offsets), sizes, strict=True):
        assert 0 <= end - start - size < ALIGN


@pytest.mark.parametrize("run", [1, 3])
def test_every_slot_of_every_block_has_bytes_of_its_own(run: int) -> None:
    """Each element of non-overlapping blocks gets a number, and all numbers are found again."""
    page = -(-compute_block_bytes(ODD, 7, torch.float32) // run)
    pages = Pages(4 * run, -(-page // ALIGN) * ALIGN)
    store = KVStore(pages, ODD, 7, torch.float32)
    assert store.pages_per_block == run
    planes = [
        plane(layer)[block] for block in range(0, 4 * run, run) for layer in range(3) for plane in (store.k, store.v)
    ]
    for number, plane in enumerate(planes):
        plane.fill_(number)
    for number, plane in enumerate(planes):
        assert (plane == number).all()


def test_a_block_is_what_its_first_page_says() -> None:
    pages = Pages(9, ALIGN * 40)
    store = KVStore(pages, ODD, 16, torch.float32)
    assert store.num_blocks == 9 - store.pages_per_block + 1
    store.k(2)[3] = 1.0
    start = 3 * pages.page_bytes + store.k_offset(2)
    assert pages.memory[start : start + 2 * 16 * 16 * 4].view(torch.float32).eq(1.0).all()
    assert pages.memory.count_nonzero() <= 2 * 16 * 16 * 4
    store.blocks[3] = 0
    assert not pages.memory.any(), "blocks[i] is all of block i"


def test_layers_of_different_sizes_follow_each_other_in_a_block() -> None:
    store = KVStore(Pages(9, ALIGN * 40), ODD, 16, torch.float32)
    end = 0
    for layer, spec in enumerate(ODD):
        assert store.k_offset(layer) == end
        sizes = (spec.num_kv_heads * 16 * dim * 4 for dim in (spec.head_dim, spec.v_head_dim))
        end += sum(-(-size // ALIGN) * ALIGN for size in sizes)
    assert end == store.block_bytes
    for offset in (store.k_offset, store.v_offset):
        with pytest.raises(ValueError, match=f"layer {len(ODD)} is not stored"):
            offset(len(ODD))


@pytest.mark.parametrize(
    ("layers", "block_size", "beyond_32_bits"),
    [(PHI4_STORED, 32, False), (PHI4_REPEATED, 4096, True)],
    ids=["stored", "repeated"],
)
def test_offsets_of_a_large_model(layers: list[LayerSpec], block_size: int, beyond_32_bits: bool) -> None:
    """Phi-4's geometry in float32: with KV heads repeated, a sequence of 4096 tokens exceeds 2**32 bytes."""
    heads, plane = layers[0].num_kv_heads, layers[0].num_kv_heads * block_size * 128 * 4
    pages = Pages(1000, compute_block_bytes(layers, block_size, torch.float32), device="meta")
    store = KVStore(pages, layers, block_size, torch.float32)
    assert store.pages_per_block == 1
    assert store.block_bytes == 80 * plane
    assert (store.v_offset(39) > 2**32) is beyond_32_bits
    for layer in range(40):
        assert store.k_offset(layer) == 2 * layer * plane
        assert store.v_offset(layer) == (2 * layer + 1) * plane
        for view, offset in ((store.k(layer), store.k_offset(layer)), (store.v(layer), store.v_offset(layer))):
            assert view.shape == (1000, heads, block_size, 128)
            assert view.storage_offset() * 4 == offset
            assert view.stride() == (pages.page_bytes // 4, block_size * 128, 128, 1)
    last = store.v(39)[999, heads - 1, block_size - 1, 127]
    assert last.storage_offset() * 4 == 1000 * pages.page_bytes - 4 > 2**32, "the last byte of the last block"


def test_layers_of_one_block_are_addressed_past_4_gib() -> None:
    """The same geometry with pages of 13 MB: a block is a run of pages, as for `contiguous`."""
    page = compute_block_bytes(PHI4_REPEATED, 8, torch.float32)
    pages = Pages(1024, page, device="meta")
    store = KVStore(pages, PHI4_REPEATED, 4096, torch.float32)
    assert store.pages_per_block == 512
    assert store.num_blocks == 513
    assert store.v(39)[512].storage_offset() * 4 == 512 * page + 79 * 40 * 4096 * 128 * 4
