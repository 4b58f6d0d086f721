"""What kernels are handed, checked and in the order in which they take it: Metal is told neither shapes nor bounds.

A tuple is the struct that stands there. Knows no operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.metal.library import Grid
from kernels.ops import Slots
from kernels.store import KVStore

LANES, GROUP = 32, 256  # threads of a simdgroup, and of a threadgroup; common.h
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def expect(holds: bool, words: str, *values: object) -> None:
    """Raises ValueError, its {} the values: whatever would be launched then would read and write astray.

    Words and values, for this comes before every launch, and to write a message may take longer.
    """
    if not holds:
        raise ValueError(words.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def known(*tensors: Tensor | None) -> bool:
    """Whether all have one type, and kernels are written for it."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes.issubset(TYPES)


def expect_together(*tensors: Tensor | None) -> None:
    """Raises ValueError unless all lie on one device, each dense in its last dimension: no kernel asks."""
    there = [tensor for tensor in tensors if tensor is not None]
    device = there[0].device
    for tensor in there:
        expect(tensor.device == device, "tensors lie on {} and {}", tensor.device, device)
        expect(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "the last dimension of a tensor must be dense")


def expect_heads(store: KVStore, layer: int, k: Sequence[int], v: Sequence[int]) -> None:
    """Raises ValueError unless (H, D) of keys and (H, Dv) of values are those of the store's layer."""
    for heads, plane in zip((k, v), store.planes(layer), strict=True):
        stored = plane.numbers.shape[1::2]
        expect(heads == stored, "heads of {} do not fit a store of {}", heads, stored)


def in_rows(x: Tensor) -> Grid:
    """A threadgroup for each row of x [N, width], of no more threads than there are numbers, in whole simdgroups."""
    group = min(GROUP, -(-x.shape[1] // LANES) * LANES)
    return Grid((group * len(x), 1, 1), (group, 1, 1))


def memory(store: KVStore) -> Tensor:
    """All of the arena, in numbers of the store's type."""
    return store.arena.memory.view(store.dtype)


def addresses(at: Slots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a step's rows. Raises ValueError."""
    there, rows = (at.table, at.row_seat, at.q_start, at.start), at.num_rows
    expect(all(each.dtype is torch.int32 for each in there), "the addresses of a step must be int32")
    expect(
        at.row_seat.shape == (rows,) and at.q_start.shape == (rows + 1,),
        "seats {} and offsets {} do not fit {} rows",
        *(at.row_seat.shape, at.q_start.shape, rows),
    )
    return there


def memory_sizes(store: KVStore, layer: int, at: Slots) -> tuple[int, ...]:
    """The struct Memory of slots.h."""
    k, v = plane_sizes(store, layer)
    return (at.block_size, at.sinks, at.ring, *k, *v, at.table.stride(0), at.num_rows)


def plane_sizes(store: KVStore, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The structs PlaneSizes of slots.h, of keys and of values."""
    k, v = (_plane_sizes(plane.numbers) for plane in store.planes(layer))
    return k, v


def _plane_sizes(numbers: Tensor) -> tuple[int, ...]:
    """Of [blocks, H, block_size, dim]."""
    block, head, vector, _ = numbers.stride()
    return numbers.shape[-1], int(numbers.storage_offset()), block, head, vector
