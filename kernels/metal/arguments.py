"""The arguments of Metal kernels in the order in which they take them, and what all kernels require of a tensor.

A tuple is the struct that stands there. Knows no operation; sizes are checked by `kernels.reference.backend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import check
from kernels.metal.library import Grid, Longs
from kernels.store import KVStore
from kernels.types import Slots

LANES, GROUP = 32, 256  # threads of a simdgroup, and of a threadgroup; common.h
DEVICES = ("mps", "cpu")  # the latter where an emulator runs the kernels
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def has_kernel_dtype(*tensors: Tensor | None) -> bool:
    """Return whether all tensors have one dtype, and kernels are written for it."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes.issubset(KERNEL_DTYPES)


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise ValueError unless all lie on one device, each dense in its last dimension: no kernel checks this."""
    there = [tensor for tensor in tensors if tensor is not None]
    device = there[0].device
    check(device.type in DEVICES, "there are no kernels for tensors on {}", device)
    for tensor in there:
        check(tensor.device == device, "tensors lie on {} and {}", tensor.device, device)
        check(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension of a tensor must be dense")


def make_row_grid(x: Tensor) -> Grid:
    """Return a threadgroup for each row of x [N, width], of no more threads than numbers, in whole simdgroups."""
    group = min(GROUP, -(-x.shape[1] // LANES) * LANES)
    return Grid((group * len(x), 1, 1), (group, 1, 1))


def typed_memory(store: KVStore) -> Tensor:
    """Return all of the memory, in numbers of the store's type."""
    return store.memory.view(store.dtype)


def slot_tensors(at: Slots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the addresses of a step's rows in the kernels' order."""
    return at.table, at.row_seat, at.q_start, at.start


def memory_sizes(at: Slots) -> tuple[int, ...]:
    """Return the struct Memory of slots.h."""
    return at.block_size, at.sinks, at.ring, at.table.stride(0), at.num_rows


def planes(store: KVStore, layer: int) -> Longs:
    """Return the struct Planes of slots.h."""
    k, v = plane_sizes(store, layer)
    return Longs((*k, *v))


def plane_sizes(store: KVStore, layer: int) -> tuple[Longs, Longs]:
    """Return the structs PlaneSizes of slots.h, of keys and of values."""
    k, v = (_plane_sizes(plane.numbers) for plane in store.planes(layer))
    return k, v


def _plane_sizes(numbers: Tensor) -> Longs:
    """Return the struct PlaneSizes of [blocks, H, block_size, dim]."""
    block, head, vector, _ = numbers.stride()
    return Longs((numbers.shape[-1], int(numbers.storage_offset()), block, head, vector))
