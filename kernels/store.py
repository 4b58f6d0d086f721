"""Keys and values of all layers as typed, strided views of an arena.

Knows how a block is laid out; neither who owns it nor which tokens lie in it. A block of `block_size` tokens is `run`
consecutive pages, and its id is the number of its first page:

    block  | layer 0: K [H, block_size, D] | V [H, block_size, Dv] | layer 1: K | V | ... | unused |
           0                              v_offset(0)             k_offset(1)            block_bytes   run * page_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.arena import Arena
from kernels.ops import LayerSpec

ALIGN = 64  # bytes: a cache line, and the widest vector


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def plane_offsets(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> list[int]:
    """Byte offsets K0, V0, K1, V1, ... within a block, and last its size. Python integers: no 32-bit overflow."""
    offsets = [0]
    for spec in layers:
        for dim in (spec.head_dim, spec.v_head_dim):
            offsets.append(offsets[-1] + _aligned(spec.num_kv_heads * block_size * dim * dtype.itemsize))
    return offsets


def block_bytes(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block of `block_size` tokens over all layers."""
    return plane_offsets(layers, block_size, dtype)[-1]


class KVStore:
    """The blocks of one strategy instance: one view per layer and plane, made once."""

    def __init__(self, arena: Arena, layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> None:
        assert arena.page_bytes % ALIGN == 0
        self.arena = arena
        self.block_size = block_size
        self.dtype = dtype
        self._offsets = plane_offsets(layers, block_size, dtype)
        self.block_bytes = self._offsets[-1]
        self.run = -(-self.block_bytes // arena.page_bytes)
        self.num_blocks = max(0, arena.pages - self.run + 1)
        self._planes = [
            self._view(offset, spec.num_kv_heads, dim)
            for (offset, _), (spec, dim) in zip(
                pairwise(self._offsets),
                ((spec, dim) for spec in layers for dim in (spec.head_dim, spec.v_head_dim)),
                strict=True,
            )
        ]
        self.blocks = arena.memory.as_strided((self.num_blocks, self.run * arena.page_bytes), (arena.page_bytes, 1))

    def _view(self, offset: int, heads: int, dim: int) -> Tensor:
        typed = self.arena.memory.view(self.dtype)
        page, start = self.arena.page_bytes // self.dtype.itemsize, offset // self.dtype.itemsize
        shape = (self.num_blocks, heads, self.block_size, dim)
        return typed.as_strided(shape, (page, self.block_size * dim, dim, 1), start)

    def k(self, layer: int) -> Tensor:
        """View [blocks, H, block_size, D]; stride(0) is a page."""
        return self._planes[2 * layer]

    def v(self, layer: int) -> Tensor:
        """View [blocks, H, block_size, Dv]; stride(0) is a page."""
        return self._planes[2 * layer + 1]

    def k_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the layer's keys."""
        return self._offsets[2 * layer]

    def v_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the layer's values."""
        return self._offsets[2 * layer + 1]

    layer_offset = k_offset
