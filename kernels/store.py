"""Keys and values of all layers as typed, strided views of pages of memory.

Knows the layout of a block, but neither its owner nor which tokens are in it. A block of `block_size` tokens is `run`
consecutive pages, and its id is the number of its first page:

    block  | layer 0: K [H, block_size, D] | V [H, block_size, Dv] | layer 1: K | V | ... | unused |
           0                              v_offset(0)             k_offset(1)            block_bytes   run * page_bytes

How a vector is stored is in kv_formats.py. A store may hold some layers of a model only or blocks of a single KV head
(`split_heads`). At the end of a block there may be room for what its owner stores there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.kv_formats import HALF_SCALE, SCALE, UINT4, KVFormat, KVFormats, Plane, as_formats, count_groups
from kernels.memory import allocate
from kernels.types import LayerSpec

ALIGN = 64  # bytes of a cache line, and of the widest vector register


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def compute_plane_offsets(layers: Iterable[LayerSpec], block_size: int, formats: KVFormats | torch.dtype) -> list[int]:
    """Return the byte offsets within a block of each layer's K and V (K0, V0, K1, ...), and last the size of the block.

    Python integers do not overflow 32 bits.
    """
    k, v = as_formats(formats)
    offsets = [0]
    for spec in layers:
        for dim, stored in ((spec.head_dim, k), (spec.v_head_dim, v)):
            offsets.append(offsets[-1] + _align(spec.num_kv_heads * block_size * stored.compute_vector_bytes(dim)))
    return offsets


def compute_block_bytes(layers: Iterable[LayerSpec], block_size: int, formats: KVFormats | torch.dtype) -> int:
    """Return the bytes of a block of `block_size` tokens over all layers."""
    return compute_plane_offsets(layers, block_size, formats)[-1]


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
        formats: KVFormats | torch.dtype,
        *,
        split_heads: bool = False,
        extra_bytes: int = 0,
    ) -> None:
        """View the memory as blocks of these layers: all of a model, or some by their numbers.

        With `split_heads` a block holds one KV head of each layer, whichever it is used for. A block ends with
        `extra_bytes` bytes that belong to its owner; they are copied with the block.
        """
        assert memory.page_bytes % ALIGN == 0
        self.memory = memory.memory
        self.page_bytes = memory.page_bytes
        self.block_size = block_size
        self.formats = k, v = as_formats(formats)
        self.device = memory.memory.device
        self.split_heads = split_heads
        specs = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
        self._heads = {i: (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) for i, spec in specs.items()}
        stored = {i: spec._replace(num_kv_heads=1) if split_heads else spec for i, spec in specs.items()}
        offsets = compute_plane_offsets(stored.values(), block_size, self.formats)
        self.extra_offset = offsets[-1]  # of the owner's bytes, from the start of a block
        self.block_bytes = offsets[-1] + _align(extra_bytes)
        self._offsets = dict(zip(specs, zip(offsets[:-1:2], offsets[1::2], strict=True), strict=True))
        self.pages_per_block = -(-self.block_bytes // self.page_bytes)
        self.num_blocks = max(0, memory.pages - self.pages_per_block + 1)
        self._planes = {
            i: (
                self._plane(k, self.k_offset(i), spec.num_kv_heads, spec.head_dim)._replace(center=self._center(spec)),
                self._plane(v, self.v_offset(i), spec.num_kv_heads, spec.v_head_dim),
            )
            for i, spec in stored.items()
        }
        shape = (self.num_blocks, self.pages_per_block * self.page_bytes)
        self.blocks = self.memory.as_strided(shape, (self.page_bytes, 1))

    def _plane(self, format: KVFormat, offset: int, heads: int, dim: int) -> Plane:
        """View the keys or values of a layer, the first of which begins `offset` bytes into a block."""
        vector = format.compute_vector_bytes(dim)

        def view(dtype: torch.dtype, start: int, width: int) -> Tensor:
            """View `width` numbers of each vector from byte `start` on."""
            size = dtype.itemsize
            strides = (self.page_bytes // size, self.block_size * vector // size, vector // size, 1)
            shape = (self.num_blocks, heads, self.block_size, width)
            return self.memory.view(dtype).as_strided(shape, strides, (offset + start) // size)

        if format.dtype is UINT4:
            scales = view(HALF_SCALE, dim // 2, 2 * count_groups(dim))
            return Plane(format, view(torch.uint8, 0, dim // 2), scales.unflatten(-1, (-1, 2)))
        numbers = view(format.dtype, 0, dim)
        return Plane(format, numbers, view(SCALE, dim, 1)[..., 0]) if format.is_quantized else Plane(format, numbers)

    def _center(self, spec: LayerSpec) -> Tensor | None:
        """Return what is subtracted from the keys of a layer's heads, [H, D]; None: nothing."""
        if spec.k_mean is None or not self.formats.k.centered:
            return None
        assert self.formats.k.is_quantized
        assert spec.ignores_shift
        assert spec.k_mean.dtype is torch.float32
        return spec.k_mean.to(self.device).contiguous()

    def describe_formats(self) -> str:
        """Return the formats as a text that differs between stores in which the same keys would be other bytes."""
        digest = hashlib.sha256()
        for layer in self.layers:
            if (center := self.k_center(layer)) is not None:
                digest.update(f"{layer}\0".encode() + center.cpu().numpy().tobytes())
        return f"{self.formats}; centers: {digest.hexdigest()[:16]}"

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
        """Return the numbers of a layer's keys, [blocks, H, block_size, D], or bytes of int4; stride(0) is one page."""
        return self.planes(layer)[0].numbers

    def v(self, layer: int) -> Tensor:
        """Return the numbers of a layer's values, [blocks, H, block_size, Dv], like `k`."""
        return self.planes(layer)[1].numbers

    def k_center(self, layer: int) -> Tensor | None:
        """Return what is subtracted from the keys of a layer, [H, D] float32 dense, also if blocks hold a head each."""
        return self.planes(layer)[0].center

    def k_offset(self, layer: int) -> int:
        """Return the offset in bytes of a layer's keys, which come first, from the start of a block."""
        self.heads(layer)
        return self._offsets[layer][0]

    def v_offset(self, layer: int) -> int:
        """Return the offset in bytes of a layer's values from the start of a block."""
        self.heads(layer)
        return self._offsets[layer][1]
