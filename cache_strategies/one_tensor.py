"""Places all regions in one tensor, for devices whose memory has to be allocated at once.

The tensor is cut into small pages, and a block takes a run of them, wherever one is free. Small blocks are allocated
from the low end and large ones from the high end, to limit fragmentation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

import torch

from kernels.memory import allocate

PAGE_BYTES = 4096
LARGE_BLOCK = 1 << 20  # bytes of a block from which on it is allocated from the high end


class OneTensor:
    """The pages of the tensor, and which of them are in use."""

    def __init__(self, total_bytes: int, device: torch.device | str, get_free_memory: object = None) -> None:
        """Allocate and touch all memory. Raises OSError or RuntimeError if there is not enough."""
        self.device = torch.device(device)
        self.pages = max(1, total_bytes // PAGE_BYTES)
        self.memory = allocate(self.pages * PAGE_BYTES, device)
        self.warm_bytes = self.memory.nbytes
        self._is_used = bytearray(self.pages)

    @staticmethod
    def round_block(block_bytes: int) -> int:
        """Return the bytes of the pages that a block takes."""
        return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES

    def place(self, block_bytes: int) -> PageRuns:
        """Return the blocks of a size."""
        return PageRuns(self, self.round_block(block_bytes) // PAGE_BYTES)

    def warm_up(self, num_bytes: int) -> None:
        """Do nothing: the memory is there."""

    def can_grow(self) -> bool:
        """Return False: there is no more memory."""
        return False

    def take(self, run: int) -> int | None:
        """Return the first page of an unused run, which is in use now; None if there is none."""
        free = bytes(run)
        page = self._is_used.rfind(free) if run * PAGE_BYTES >= LARGE_BLOCK else self._is_used.find(free)
        if page < 0:
            return None
        self._is_used[page : page + run] = b"\1" * run
        return page

    def give(self, page: int, run: int) -> None:
        """Take back a run of pages."""
        self._is_used[page : page + run] = bytes(run)

    def count_usable_bytes(self, block_bytes: int, pinned: Iterable[tuple[Collection[int], int]]) -> int:
        """Return how many bytes blocks of a size could fill if no block but the pinned ones, with pages, was in use."""
        runs = sorted((page, page + run) for blocks, run in pinned for page in blocks)
        edges = [(0, 0), *runs, (self.pages, self.pages)]
        run = max(1, self.round_block(block_bytes) // PAGE_BYTES)
        return sum((after[0] - before[1]) // run * run for before, after in pairwise(edges)) * PAGE_BYTES


class PageRuns:
    """The blocks of one region: runs of pages of the tensor."""

    page_bytes = PAGE_BYTES

    def __init__(self, space: OneTensor, run: int) -> None:
        self.memory = space.memory.view(-1)  # an object of its own
        self.pages = self.extent = space.pages
        self.run = run
        self._space = space
        self._used: set[int] = set()

    def take(self, count: int) -> list[int] | None:
        """Return unused blocks, which are in use now; None if they do not fit between other blocks."""
        blocks: list[int] = []
        while len(blocks) < count:
            page = self._space.take(self.run)
            if page is None:
                self.give(blocks)
                return None
            self._used.add(page)
            blocks.append(page)
        return blocks

    def give(self, blocks: Iterable[int]) -> None:
        """Take back blocks. Raises ValueError for one that is not in use."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is not allocated: was it released before?")
            self._used.remove(block)
            self._space.give(block, self.run)

    @property
    def num_used(self) -> int:
        """The number of blocks in use."""
        return len(self._used)

    def list_used(self) -> list[int]:
        """Return the numbers of all blocks in use, ascending."""
        return sorted(self._used)

    def close(self) -> None:
        """Do nothing: no block is in use any more."""
