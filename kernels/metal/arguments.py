"""Builds the arguments of Metal kernels in the kernels' order, and checks what every kernel requires of a tensor.

A tuple is passed as a struct. Knows no operation: `kernels.reference.backend` checks sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import check
from kernels.metal.library import Grid, Longs
from kernels.store import KVStore
from kernels.types import Slots

LANES, GROUP = 32, 256  # number of threads in a simdgroup, and in a threadgroup; as in common.h
DEVICES = ("mps", "cuda", "privateuseone", "cpu")  # the last two are for the emulator; tests of kernels use the CPU
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def has_kernel_dtype(*tensors: Tensor | None) -> bool:
    """Return whether all tensors (None is skipped) have one dtype, for which there are kernels."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes.issubset(KERNEL_DTYPES)


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device and dense in their last dimension."""
    there = [tensor for tensor in tensors if tensor is not None]
    device = there[0].device
    check(device.type in DEVICES, "there are no kernels for tensors on {}", device)
    for tensor in there:
        check(tensor.device == device, "tensors lie on {} and {}", tensor.device, device)
        check(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension of a tensor must be dense")


def make_row_grid(x: Tensor) -> Grid:
    """Return a grid with a threadgroup per row of x [N, width]: at most GROUP threads, in whole simdgroups."""
    group = min(GROUP, -(-x.shape[1] // LANES) * LANES)
    return Grid((group * len(x), 1, 1), (group, 1, 1))


def typed_memory(store: KVStore) -> Tensor:
    """Return all memory of the store as one tensor of the store's dtype, which keys and values have in common."""
    assert store.dtype is not None
    return store.memory.view(store.dtype)


def slot_tensors(at: Slots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a step's addresses (block table, table_row, q_start, start), in the kernels' order."""
    return at.table, at.table_row, at.q_start, at.start


def memory_sizes(at: Slots) -> tuple[int, ...]:
    """Return the struct Memory of slots.h: block size, sinks, ring, stride of the block table, rows, split heads."""
    heads = at.start.shape[1] if at.split_heads else 1
    return at.block_size, at.sinks, at.ring, at.table.stride(0), at.num_rows, heads


def planes(store: KVStore, layer: int) -> Longs:
    """Return the struct Planes of slots.h for a layer: the layouts of its keys and of its values in memory."""
    k, v = plane_sizes(store, layer)
    return Longs((*k, *v))


def plane_sizes(store: KVStore, layer: int) -> tuple[Longs, Longs]:
    """Return two structs PlaneSizes of slots.h: the layouts of a layer's keys and of its values in memory."""
    k, v = (_plane_sizes(plane.numbers) for plane in store.planes(layer))
    return k, v


def _plane_sizes(numbers: Tensor) -> Longs:
    """Return the struct PlaneSizes of keys or values [blocks, H, block_size, dim]: dim, offset and three strides."""
    block, head, vector, _ = numbers.stride()
    return Longs((numbers.shape[-1], int(numbers.storage_offset()), block, head, vector))


def make_token_buffer(store: KVStore, layer: int, count: int) -> tuple[Tensor, Longs, Tensor]:
    """Return memory for the keys and values of `count` tokens of a layer, its struct Planes, and its slots [count].

    It is laid out as one block with `count` slots.
    """
    sizes, end = [], 0
    for plane in store.planes(layer):
        _, heads, _, dim = plane.numbers.shape
        vector = plane.numbers.stride(2)
        sizes += [dim, end, 0, count * vector, vector]
        end += heads * count * vector
    memory = torch.empty(end, dtype=store.dtype, device=store.device)
    return memory, Longs(sizes), torch.arange(count, device=store.device)
