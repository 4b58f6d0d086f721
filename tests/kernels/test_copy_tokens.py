"""Copying tokens moves the bytes that a store's layout says, and no others, or writes nothing and raises ValueError.

The expected bytes are computed from the definition of a block, by loops over single vectors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import Ops
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec
from tests.kernels.backend_matrix import BACKENDS, NAMES

LAYERS = (LayerSpec(3, 6, 12, 20), LayerSpec(2, 2, 64, 64), LayerSpec(1, 1, 8, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64)
Bytes = NDArray[np.uint8]


class Kind(NamedTuple):
    """How a store is cut into blocks."""

    block_size: int
    pages_per_block: int = 1
    split_heads: bool = False

    @property
    def name(self) -> str:
        split = ", split heads" if self.split_heads else ""
        return f"blocks of {self.block_size} slots and {self.pages_per_block} pages{split}"


KINDS = (Kind(16), Kind(1), Kind(7, 3), Kind(16, split_heads=True), Kind(5, 2, split_heads=True))
backends = pytest.mark.parametrize("backend", NAMES)


def make_store(kind: Kind, dtype: torch.dtype, blocks: int) -> KVStore:
    """Return a store with random bytes, also in the pages' unused ends; floats are then NaN now and then."""
    stored = [spec._replace(num_kv_heads=1) if kind.split_heads else spec for spec in LAYERS]
    size = compute_block_bytes(stored, kind.block_size, dtype)
    page = -(-size // kind.pages_per_block // 64) * 64 + 64
    pages = Pages(blocks * kind.pages_per_block, page)
    pages.memory.copy_(torch.randint(0, 256, pages.memory.shape).byte())
    store = KVStore(pages, LAYERS, kind.block_size, dtype, split_heads=kind.split_heads)
    assert store.pages_per_block == kind.pages_per_block
    return store


def find_vector(store: KVStore, layer: int, part: int, slot: int, head: int) -> slice:
    """Return the bytes of memory that hold a key (part 0) or a value (part 1), as store.py describes a block."""
    block, offset = divmod(slot, store.block_size)
    begin = block * store.page_bytes
    for i, spec in enumerate(LAYERS):
        for j, dim in enumerate((spec.head_dim, spec.v_head_dim)):
            dtype = store.formats[j].dtype
            size = dim + 4 if dtype is torch.int8 else dim * dtype.itemsize
            if (i, j) == (layer, part):
                first = begin + (head * store.block_size + offset) * size
                return slice(first, first + size)
            heads = 1 if store.split_heads else spec.num_kv_heads
            begin += -(-heads * store.block_size * size // 64) * 64
    raise AssertionError("there is no such layer")


def copy_by_loops(store: KVStore, layer: int, src: Tensor, dst: Tensor) -> Bytes:
    """Return the memory after the copy, vector by vector."""
    before = store.memory.numpy().copy()
    after = before.copy()
    for head in range(store.k(layer).shape[1]):
        for a, b in zip(*(x.tolist() if x.dim() == 1 else x[:, head].tolist() for x in (src, dst)), strict=True):
            for part in (0, 1):
                source, target = (find_vector(store, layer, part, slot, head) for slot in (a, b))
                after[target] = before[source]
    return after


def check_copy(ops: Ops, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
    """Copy tokens with an operation, and compare all bytes of the memory with those after the loops."""
    want = copy_by_loops(store, layer, src, dst)
    ops.copy_tokens(store, layer, src, dst)
    assert np.array_equal(store.memory.numpy(), want), (layer, src, dst)


def draw_slots(store: KVStore, blocks: Sequence[int], count: int, columns: int | None) -> Tensor:
    """Return `count` different slots of these blocks, sometimes in order; for each column others."""

    def column() -> list[int]:
        slots = [block * store.block_size + i for block in blocks for i in range(store.block_size)]
        drawn = random.sample(slots, count)
        return sorted(drawn) if random.random() < 0.5 else drawn

    if columns is None:
        return torch.tensor(column())
    return torch.tensor([column() for _ in range(columns)]).T


def draw_copy(store: KVStore, layer: int, *, by_head: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Return slots to read and slots to write, of which none is in both."""
    run = store.pages_per_block
    first = random.randrange(run)  # blocks need not begin at a multiple of their pages
    blocks = random.sample(range(first, store.num_blocks, run), (store.num_blocks - first - 1) // run + 1)
    cut = random.randint(1, len(blocks) - 1)
    count = random.randint(1, min(cut, len(blocks) - cut) * store.block_size)
    heads = store.k(layer).shape[1]
    src, dst = (
        draw_slots(store, part, count, heads if split else None)
        for part, split in zip((blocks[:cut], blocks[cut:]), by_head, strict=True)
    )
    return src.contiguous(), dst.contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@backends
def test_copied_bytes_are_those_of_a_loop(backend: str, kind: Kind, dtype: torch.dtype) -> None:
    ops = BACKENDS[backend]()
    for layer in range(len(LAYERS)):
        for by_head in ((False, False), (True, True), (True, False), (False, True)):
            store = make_store(kind, dtype, blocks=9)
            src, dst = draw_copy(store, layer, by_head=by_head)
            check_copy(ops, store, layer, src, dst)


@backends
def test_many_tokens_are_shared_among_threads(backend: str) -> None:
    store = make_store(Kind(16), torch.bfloat16, blocks=400)
    slots = torch.randperm(400)[:, None] * 16 + torch.arange(16)
    src, dst = slots[:200].flatten(), slots[200:].flatten()
    kept = torch.rand(len(src)) < 0.7
    src, dst = src[kept], dst[: int(kept.sum())]
    check_copy(BACKENDS[backend](), store, 1, src, dst)


@backends
def test_a_slot_may_be_read_more_than_once_and_heads_may_cross(backend: str) -> None:
    """What one head reads another one may write, since they are different memory."""
    store = make_store(Kind(4), torch.float32, blocks=4)
    src, dst = torch.tensor([[0, 5], [0, 5]]), torch.tensor([[5, 0], [9, 9]])
    check_copy(BACKENDS[backend](), store, 1, src, dst)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@backends
def test_all_slots_are_read_before_any_is_written(backend: str, kind: Kind, dtype: torch.dtype) -> None:
    """Slots may be in both lists: tokens that move forward, backward, change places or stay."""
    ops = BACKENDS[backend]()
    for layer in range(len(LAYERS)):
        store = make_store(kind, dtype, blocks=9)
        heads = store.k(layer).shape[1]
        blocks = range(0, store.num_blocks - store.pages_per_block + 1, store.pages_per_block)
        count = random.randint(2, 2 * store.block_size)
        for columns in (None, heads):
            slots = [draw_slots(store, blocks[:3], count, columns) for _ in range(2)]
            src, dst = (each.contiguous() for each in slots)
            check_copy(ops, store, layer, src, dst)


@backends
def test_many_tokens_move_within_their_sequence(backend: str) -> None:
    store = make_store(Kind(16), torch.bfloat16, blocks=400)
    slots = (torch.randperm(400)[:, None] * 16 + torch.arange(16)).flatten()
    src = slots[torch.rand(len(slots)) < 0.5]
    dst = slots[: len(src)]
    check_copy(BACKENDS[backend](), store, 1, src, dst)


@backends
def test_slices_of_tensors_are_slots_too(backend: str) -> None:
    store = make_store(Kind(4), torch.float32, blocks=4)
    src, dst = torch.arange(24).view(6, 4)[1:3, 1:3], torch.tensor([12, 13, 14, 15])[1:3]
    check_copy(BACKENDS[backend](), store, 1, src, dst)


@pytest.mark.parametrize("shape", [(0,), (0, 2)])
@backends
def test_no_tokens_are_no_copy(backend: str, shape: tuple[int, ...]) -> None:
    store = make_store(Kind(4), torch.float32, blocks=2)
    before = store.memory.clone()
    BACKENDS[backend]().copy_tokens(store, 1, torch.zeros(shape).long(), torch.zeros(shape).long())
    assert torch.equal(store.memory, before)


def fault_of(copy: Callable[[], None], store: KVStore) -> str | None:
    """Return the message of the ValueError that a copy raises before it writes anything; None if it raises none."""
    before = store.memory.clone()
    try:
        copy()
    except ValueError as error:
        assert torch.equal(store.memory, before), "written before it was refused"
        return str(error)
    return None


def is_refused(ops: Ops, store: KVStore, src: Tensor, dst: Tensor) -> bool:
    fault = fault_of(lambda: ops.copy_tokens(store, 1, src, dst), store)
    assert fault is None or fault.startswith("copy_tokens: ")
    return fault is not None


WRONG: dict[str, tuple[object, object]] = {
    "a slot before the store": ([0, -1], [8, 9]),
    "a slot after the store": ([0, 1], [8, 16]),
    "a slot far away": ([0, 1 << 62], [8, 9]),
    "the least number": ([-(1 << 63), 0], [8, 9]),
    "a slot written twice": ([0, 1], [8, 8]),
    "more slots to read": ([0, 1, 2], [8, 9]),
    "nothing to write": ([0], []),
    "a head that writes a slot twice": ([[0, 1], [2, 3]], [[8, 9], [9, 9]]),
    "more heads than the layer": ([[0, 1, 2]], [8]),
    "fewer heads than the layer": ([[0]], [8]),
    "a dimension more": ([[[0, 1]]], [8]),
}


@pytest.mark.parametrize("what", WRONG)
@backends
def test_wrong_slots_are_refused_before_anything_is_written(backend: str, what: str) -> None:
    store = make_store(Kind(4), torch.float32, blocks=4)
    src, dst = (torch.tensor(x, dtype=torch.int64) for x in WRONG[what])
    assert is_refused(BACKENDS[backend](), store, src, dst)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
@backends
def test_slots_of_another_type_or_layout_are_refused(backend: str, dtype: torch.dtype) -> None:
    store, ops = make_store(Kind(4), torch.float32, blocks=4), BACKENDS[backend]()
    right = torch.arange(2), torch.arange(8, 10)
    for i in (0, 1):
        for wrong in (right[i].to(dtype), right[i].to("meta"), right[i][0], torch.stack((right[i],) * 2, 1)[:, 0]):
            assert is_refused(ops, store, *(wrong if j == i else x for j, x in enumerate(right)))
    assert is_refused(ops, store, *(torch.stack((x, x)).T for x in right))


@backends
def test_blocks_that_overlap_are_refused(backend: str) -> None:
    """A block of three pages begins at any page, so the numbers of two blocks must be three apart."""
    ops = BACKENDS[backend]()
    for apart in range(1, 7):
        store = make_store(Kind(7, 3), torch.float32, blocks=4)
        src, dst = torch.tensor([1 * 7 + 2]), torch.tensor([(1 + apart) * 7 + 5])
        assert is_refused(ops, store, src, dst) is (apart < 3)
        by_head = (x[:, None].expand(-1, 2).contiguous() for x in (src, dst))
        assert is_refused(ops, store, *by_head) is (apart < 3)
        fault = fault_of(lambda: ops.copy_blocks(store, [1], [1 + apart]), store)  # noqa: B023 - called at once
        assert (fault is not None and "overlap" in fault) is (apart < 3)


@backends
def test_a_layer_that_is_not_stored_is_refused(backend: str) -> None:
    store = make_store(Kind(4), torch.float32, blocks=4)
    with pytest.raises(ValueError, match="layer 3 is not stored"):
        BACKENDS[backend]().copy_tokens(store, 3, torch.tensor([0]), torch.tensor([8]))
