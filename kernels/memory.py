"""Allocates memory that stays until the process ends, on any device. Does not know what is stored in it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


def allocate(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Allocate a tensor [size] uint8 of zeros; all of it is touched, so that the system cannot run out of it later.

    On Linux it uses huge pages, if the system grants them (`madvise`, MADV_HUGEPAGE): reading keys from scattered
    blocks then needs no page walk for each block.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return allocate_untouched(size).zero_()


def allocate_untouched(size: int) -> Tensor:
    """Allocate a tensor [size] uint8 on the CPU without touching it, for a caller that will write all of it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # raised by an operating system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class WeightArena:
    """Allocates long-lived tensors, such as weights, from large chunks: alone, each is too small for a huge page.

    A tensor keeps its chunk alive. Memory is not touched until the caller writes it.
    """

    CHUNK_BYTES = 64 << 20  # bytes of a chunk; a larger tensor gets a chunk of its own size
    ALIGN = 64  # a cache line

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return a tensor [size] uint8 that is not initialised."""
        padded = -(-size // self.ALIGN) * self.ALIGN
        if padded > len(self._left):
            self._left = allocate_untouched(max(padded, self.CHUNK_BYTES))
        taken, self._left = self._left[:size], self._left[padded:]
        return taken


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype along the first dimension.

    On a CPU the result is a memory mapping of its own, which goes back to the system when the tensor is freed; malloc
    would keep it, as small tensors that stay lie between large ones that are freed.
    """
    first = parts[0]
    if first.device.type != "cpu":
        return torch.cat([*parts])
    shape = sum(len(part) for part in parts), *first.shape[1:]
    memory = allocate_untouched(sum(part.nbytes for part in parts)).view(first.dtype).view(shape)
    return torch.cat([*parts], out=memory)
