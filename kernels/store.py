"""Keys and values of all layers as typed, strided views of pages of memory.

Knows the layout of a block, but neither its owner nor which tokens are in it. A block of `block_size` tokens is `run`
consecutive pages, and its id is the number of its first page:

    block  | layer 0: K [H, block_size, D] | V [H, block_size, Dv] | layer 1: K | V | ... | unused |
           0                              v_offset(0)             k_offset(1)            block_bytes   run * page_bytes

In int8 each vector of D numbers is followed by its float32 scale, 4 bytes. A store may hold some layers of a model only
or blocks of a single KV head (`split_heads`). At the end of a block there may be room for what its owner stores there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.memory import allocate
from kernels.types import LayerSpec

SCALE = torch.float32  # dtype of the scale of an int8 vector
ALIGN = 64  # bytes of a cache line, and of the widest vector register


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def compute_vector_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key or value in one head, the scale of int8 included."""
    if dtype is not torch.int8:
        return dim * dtype.itemsize
    assert dim % SCALE.itemsize == 0, "scales would not be aligned"
    return dim + SCALE.itemsize


def compute_plane_offsets(
    layers: Iterable[LayerSpec], block_size: int, dtype: torch.dtype, v_dtype: torch.dtype | None = None
) -> list[int]:
    """Return the byte offsets within a block of each layer's K and V (K0, V0, K1, ...), and last the size of the block.

    `v_dtype` is the dtype of values, if it is not that of keys. Python integers do not overflow 32 bits.
    """
    offsets = [0]
    for spec in layers:
        for dim, stored in ((spec.head_dim, dtype), (spec.v_head_dim, v_dtype or dtype)):
            offsets.append(offsets[-1] + _align(spec.num_kv_heads * block_size * compute_vector_bytes(dim, stored)))
    return offsets


def compute_block_bytes(
    layers: Iterable[LayerSpec], block_size: int, dtype: torch.dtype, v_dtype: torch.dtype | None = None
) -> int:
    """Return the bytes of a block of `block_size` tokens over all layers."""
    return compute_plane_offsets(layers, block_size, dtype, v_dtype)[-1]


class Plane(NamedTuple):
    """The keys or the values of one layer in all blocks."""

    numbers: Tensor  # [blocks, H, block_size, dim]
    scale: Tensor | None  # [blocks, H, block_size] float32, the scale of each int8 vector; None for other dtypes


class PagedMemory(Protocol):
    """Memory cut into pages, as a store needs it; which pages are in use is known by its owner."""

    @property
    def memory(self) -> Tensor:
        """Return the memory of all pages, [pages * page_bytes] uint8."""
        ...

    @property
    def pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...


class Pages:
    """Paged memory that belongs to no strategy, for tests and benchmarks of kernels."""

    def __init__(
        self, pages: int, page_bytes: int, device: torch.device | str = "cpu", *, memory: Tensor | None = None
    ) -> None:
        """Allocate all pages, or use `memory` [pages * page_bytes] uint8 without changing it."""
        self.pages = pages
        self.page_bytes = page_bytes
        self.memory = allocate(pages * page_bytes, device) if memory is None else memory
        assert self.memory.nbytes == pages * page_bytes


class KVStore:
    """The blocks of one strategy instance: views of its keys and of its values for each layer, made once."""

    def __init__(
        self,
        memory: PagedMemory,
        layers: Sequence[LayerSpec] | Mapping[int, LayerSpec],
        block_size: int,
        dtype: torch.dtype,
        v_dtype: torch.dtype | None = None,
        *,
        split_heads: bool = False,
        extra_bytes: int = 0,
    ) -> None:
        """View the memory as blocks of these layers: all of a model, or some by their numbers.

        Values are stored in `v_dtype`, by default in that of keys.
        With `split_heads` a block holds one KV head of each layer, whichever it is used for. A block ends with
        `extra_bytes` bytes that belong to its owner; they are copied with the block.
        """
        assert memory.page_bytes % ALIGN == 0
        self.memory = memory.memory
        self.page_bytes = memory.page_bytes
        self.block_size = block_size
        self.k_dtype, self.v_dtype = dtype, v_dtype or dtype
        self.dtype = dtype if self.v_dtype is dtype else None  # of all numbers; None: keys and values differ in it
        self.formats = f"{self.k_dtype}, {self.v_dtype}"  # in words
        self.device = memory.memory.device
        self.split_heads = split_heads
        specs = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
        self._heads = {i: (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) for i, spec in specs.items()}
        stored = {i: spec._replace(num_kv_heads=1) if split_heads else spec for i, spec in specs.items()}
        offsets = compute_plane_offsets(stored.values(), block_size, dtype, v_dtype)
        self.extra_offset = offsets[-1]  # of the owner's bytes, from the start of a block
        self.block_bytes = offsets[-1] + _align(extra_bytes)
        self._offsets = dict(zip(specs, zip(offsets[:-1:2], offsets[1::2], strict=True), strict=True))
        self.pages_per_block = -(-self.block_bytes // self.page_bytes)
        self.num_blocks = max(0, memory.pages - self.pages_per_block + 1)
        self._planes = {
            i: (
                self._plane(self.k_dtype, self.k_offset(i), spec.num_kv_heads, spec.head_dim),
                self._plane(self.v_dtype, self.v_offset(i), spec.num_kv_heads, spec.v_head_dim),
            )
            for i, spec in stored.items()
        }
        shape = (self.num_blocks, self.pages_per_block * self.page_bytes)
        self.blocks = self.memory.as_strided(shape, (self.page_bytes, 1))

    def _view(self, dtype: torch.dtype, offset: int, heads: int, width: int, vector_bytes: int) -> Tensor:
        """View `width` numbers of each vector as [blocks, H, block_size, width] in `dtype`.

        The first vector begins `offset` bytes into a block.
        """
        typed, size = self.memory.view(dtype), dtype.itemsize
        vector = vector_bytes // size
        strides = (self.page_bytes // size, self.block_size * vector, vector, 1)
        return typed.as_strided((self.num_blocks, heads, self.block_size, width), strides, offset // size)

    def _plane(self, dtype: torch.dtype, offset: int, heads: int, dim: int) -> Plane:
        vector = compute_vector_bytes(dim, dtype)
        numbers = self._view(dtype, offset, heads, dim, vector)
        scale = self._view(SCALE, offset + dim, heads, 1, vector)[..., 0] if dtype is torch.int8 else None
        return Plane(numbers, scale)

    @property
    def blocks_per_token(self) -> int:
        """The number of blocks that hold a token: one, or one for each KV head of a layer if heads are split."""
        return max(heads for heads, _, _ in self._heads.values()) if self.split_heads else 1

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers whose keys and values the store holds."""
        return list(self._heads)

    def heads(self, layer: int) -> tuple[int, int, int]:
        """Return a layer's (number of KV heads, head_dim, v_head_dim). Raises ValueError for a layer not stored."""
        if layer not in self._heads:
            raise ValueError(f"layer {layer} is not stored: the layers are {self.layers}")
        return self._heads[layer]

    def planes(self, layer: int) -> tuple[Plane, Plane]:
        """Return the keys and the values of a layer. Raises ValueError for a layer that is not stored."""
        self.heads(layer)
        return self._planes[layer]

    def find_finite_blocks(self, blocks: Sequence[int]) -> list[bool]:
        """Return for each of these full blocks whether all its keys and values are finite. Waits for the device."""
        planes = (plane for pair in self._planes.values() for plane in pair)
        tensors = (plane.numbers if plane.scale is None else plane.scale for plane in planes)
        finite_by_plane = torch.stack(
            [plane[blocks].isfinite().flatten(1).all(dim=1) for plane in tensors]
        )  # [planes, blocks]
        finite: list[bool] = finite_by_plane.all(dim=0).tolist()
        return finite

    def k(self, layer: int) -> Tensor:
        """Return the keys of a layer, [blocks, H, block_size, D]; as a block id is a page, stride(0) is one page."""
        return self.planes(layer)[0].numbers

    def v(self, layer: int) -> Tensor:
        """Return the values of a layer, [blocks, H, block_size, Dv]; as a block id is a page, stride(0) is one page."""
        return self.planes(layer)[1].numbers

    def k_offset(self, layer: int) -> int:
        """Return the offset in bytes of a layer's keys, which come first, from the start of a block."""
        self.heads(layer)
        return self._offsets[layer][0]

    def v_offset(self, layer: int) -> int:
        """Return the offset in bytes of a layer's values from the start of a block."""
        self.heads(layer)
        return self._offsets[layer][1]
