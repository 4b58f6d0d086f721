"""Builds the arguments of Metal kernels in the kernels' order, and checks what every kernel requires of a tensor.

A tuple is passed as a struct. Knows no operation: `kernels.reference.backend` checks sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import check
from kernels.kv_formats import UINT4, KVFormats, Plane
from kernels.metal.library import Grid, Longs
from kernels.store import KVStore
from kernels.types import Slots

LANES, GROUP = 32, 256  # number of threads in a simdgroup, and in a threadgroup; as in common.h
DEVICES = ("mps", "cuda", "privateuseone", "cpu")  # the last two are for the emulator; tests of kernels use the CPU
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_INT4_DIM = 256  # widest head whose int4 numbers a simdgroup holds
COPY_UNIT = torch.int16  # in which copy_tokens of store.metal copies; every vector has a multiple of it


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


def has_kv_kernels(store: KVStore, layer: int, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for the formats of a store and the widths of a layer's heads.

    The model computes in `dtype`.
    """
    _, *dims = store.heads(layer)
    return has_format_kernels(store.formats, dtype) and all(
        format.dtype is not UINT4 or dim <= MAX_INT4_DIM for format, dim in zip(store.formats, dims, strict=True)
    )


def has_format_kernels(formats: KVFormats, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for keys and values in these formats, whatever the width of their heads."""
    return dtype in KERNEL_DTYPES and all(
        format.dtype is UINT4 or (format.dtype in (dtype, torch.int8) and not format.rotated) for format in formats
    )


def kv_types(formats: KVFormats, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the types for which store.metal and the attention kernels are compiled: see vectors.h."""
    return {"T": dtype, "K": formats.k.dtype, "V": formats.v.dtype}


def slot_tensors(at: Slots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a step's addresses (block table, table_row, q_start, start), in the kernels' order."""
    return at.table, at.table_row, at.q_start, at.start


def memory_sizes(at: Slots) -> tuple[int, ...]:
    """Return the struct Memory of slots.h: block size, sinks, ring, stride of the block table, rows, split heads."""
    heads = at.start.shape[1] if at.split_heads else 1
    return at.block_size, at.sinks, at.ring, at.table.stride(0), at.num_rows, heads


def planes(store: KVStore, layer: int, unit: torch.dtype | None = None) -> Longs:
    """Return the struct Planes of slots.h for a layer: the layouts of its keys and of its values in memory."""
    k, v = store.planes(layer)
    return Longs((*plane_sizes(k, unit), *plane_sizes(v, unit)))


def plane_sizes(plane: Plane, unit: torch.dtype | None = None) -> Longs:
    """Return the struct PlaneSizes of keys or values: dim, offset, three strides, and whether they are rotated.

    Offset and strides are counted in `unit`, by default the dtype of the numbers.
    """
    numbers, size = plane.numbers, (unit or plane.numbers.dtype).itemsize
    dim = numbers.shape[-1] * (2 if plane.format.dtype is UINT4 else 1)
    block, head, vector, _ = numbers.stride()
    places = (place * numbers.itemsize // size for place in (int(numbers.storage_offset()), block, head, vector))
    return Longs((dim, *places, int(plane.format.rotated)))


def make_token_buffer(store: KVStore, layer: int, count: int) -> tuple[Tensor, Longs, Tensor]:
    """Return memory for the keys and values of `count` tokens of a layer, its struct Planes, and its slots [count].

    It is laid out as one block with `count` slots, and consists of units of copying.
    """
    sizes, end = [], 0
    for plane in store.planes(layer):
        dim, _, _, _, vector, rotated = plane_sizes(plane, COPY_UNIT)
        sizes += [dim, end, 0, count * vector, vector, rotated]
        end += plane.numbers.shape[1] * count * vector
    memory = torch.empty(end, dtype=COPY_UNIT, device=store.device)
    return memory, Longs(sizes), torch.arange(count, device=store.device)
