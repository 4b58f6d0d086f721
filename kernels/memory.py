"""Memory that is allocated once and stays: bytes, on any device. What lies in it, and whose it is, others know."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def allocate(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Allocate [size] uint8, zero, and touched: none of it can turn out to be missing later.

    On Linux in huge pages, if the system grants them: keys that lie apart are then found without a walk through the
    page table for each block (`madvise`, MADV_HUGEPAGE).
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return allocate_untouched(size).zero_()


def allocate_untouched(size: int) -> Tensor:
    """Allocate [size] uint8 of a CPU's memory without touching it, for a caller that writes all of it anyway."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class WeightArena:
    """Memory for many tensors that stay, one after the other: each by itself is too small for a huge page.

    A tensor keeps the stretch it lies in; nothing of it is touched before its taker does.
    """

    STRETCH_BYTES = 64 << 20  # bytes, and more for what is larger
    ALIGN = 64  # a cache line

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Take [size] uint8."""
        padded = -(-size // self.ALIGN) * self.ALIGN
        if padded > len(self._left):
            self._left = allocate_untouched(max(padded, self.STRETCH_BYTES))
        taken, self._left = self._left[:size], self._left[padded:]
        return taken


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of one dtype; a CPU's memory goes back to the system with the result.

    malloc would keep it: between large tensors that go lie small ones that stay.
    """
    first = parts[0]
    if first.device.type != "cpu":
        return torch.cat([*parts])
    shape = sum(len(part) for part in parts), *first.shape[1:]
    memory = allocate_untouched(sum(part.nbytes for part in parts)).view(first.dtype).view(shape)
    return torch.cat([*parts], out=memory)


class ConcatenatedWeight:
    """The rows of several matrices [n, in] of one dtype, one after the other; `concatenate` makes them one matrix."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Raise ValueError for parts of several widths or dtypes."""
        widths = {(part.shape[-1], part.dtype) for part in parts}
        if len(widths) != 1 or any(part.dim() != 2 for part in parts):
            shapes = ", ".join(f"{part.dtype} {[*part.shape]}" for part in parts)
            raise ValueError(f"matrices of one width and dtype can be joined, not {shapes}")
        self.parts = parts
        self.shape = torch.Size((sum(map(len, parts)), *parts[0].shape[1:]))
        self.dtype = parts[0].dtype

    def concatenate(self) -> Tensor:
        """Return the parts as one new matrix."""
        return concatenate(self.parts)
