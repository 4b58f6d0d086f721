"""Allocates an instance's blocks from the arena and counts the references to each. Knows neither tokens nor seats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_strategies.arena import Arena
from cache_strategies.types import PageState

STATE_BY_COUNT = np.array([PageState.IDLE, PageState.IN_USE, PageState.SHARED], np.uint8)  # the last: 2 and more


class RefCounts:
    """The reference count of each allocated block: references of seats, pins and unfinished copies.

    A block of a group of layers has pages for each part of the group: `run` consecutive ones. It is identified by the
    number of its first page. A block of a group without parts takes no memory and is identified by a negative number.
    """

    def __init__(self, arena: Arena, owner: str, run: int, parts: Sequence[int] = (1,)) -> None:
        """Make counts for blocks of groups with these numbers of parts."""
        self._arena = arena
        self._owner = owner
        self._run = run
        self._parts = parts
        self._counts: dict[int, int] = {}
        self._pages: dict[int, Sequence[int]] = {}  # first page of each part, of blocks that do not have one part
        self._groups: dict[int, int] = {}  # number of the group, of blocks that are not in group 0
        self._num_without_pages = 0  # number of blocks without pages that have been allocated so far

    def allocate(self, group: int = 0) -> int | None:
        """Allocate a block of a group with one reference; None if there is not enough memory."""
        parts = self._parts[group]
        block = self._arena.allocate(self._owner, self._run) if parts == 1 else self._allocate_parts(parts)
        if block is not None:
            self._counts[block] = 1
            if group:
                self._groups[block] = group
        return block

    def _allocate_parts(self, parts: int) -> int | None:
        pages: list[int] = []
        for _ in range(parts):
            page = self._arena.allocate(self._owner, self._run)
            if page is None:
                for taken in pages:
                    self._arena.release(self._owner, taken, self._run)
                return None
            pages.append(page)
        self._num_without_pages += not pages
        block = pages[0] if pages else -self._num_without_pages
        self._pages[block] = pages
        return block

    def group(self, block: int) -> int:
        """Return the number of the group that a block belongs to."""
        return self._groups.get(block, 0)

    def pages(self, block: int) -> Sequence[int]:
        """Return the first page of each part of a block: its ids in the parts' stores."""
        return self._pages.get(block, (block,))

    def incref(self, block: int) -> bool:
        """Add a reference to a block; return whether the block had none before."""
        self._counts[block] += 1
        return self._counts[block] == 1

    def decref(self, block: int) -> bool:
        """Drop a reference to a block; return whether that was its last. The block stays allocated until release()."""
        assert self._counts[block] > 0
        self._counts[block] -= 1
        return not self._counts[block]

    def count(self, block: int) -> int:
        """Return the number of references to a block."""
        return self._counts[block]

    def is_used(self, block: int) -> bool:
        """Return whether a block has a reference."""
        return self._counts[block] > 0

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def release(self, block: int) -> None:
        """Free a block without references."""
        assert not self._counts[block]
        del self._counts[block]
        for page in self.pages(block):
            self._arena.release(self._owner, page, self._run)
        self._pages.pop(block, None)
        self._groups.pop(block, None)

    def __len__(self) -> int:
        return len(self._counts)

    def find_block(self, page: int) -> int | None:
        """Return the block that a page is a part of; None if there is none. Takes time proportional to all blocks."""
        first_pages = range(page - self._run + 1, page + 1)
        return next((block for block in self._counts if any(first in first_pages for first in self.pages(block))), None)

    def mark_pages(self, states: NDArray[np.uint8]) -> None:
        """Write the state of all blocks into `states`, by page: idle, in use, or shared by several references."""
        counts = self._counts
        if self._pages:  # some blocks do not have one part
            counts = {page: count for block, count in counts.items() for page in self.pages(block)}
        first_pages = np.fromiter(counts, np.int64, len(counts))
        found = STATE_BY_COUNT[np.minimum(np.fromiter(counts.values(), np.int64, len(counts)), 2)]
        for offset in range(self._run):
            states[first_pages + offset] = found

    def check_integrity(self, references: Mapping[int, int], idle: int) -> None:
        """Assert that the counts equal `references` (by block), and that exactly `idle` blocks have no reference."""
        counted = {block: n for block, n in self._counts.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert len(self._counts) == len(counted) + idle
        num_runs = sum(len(self.pages(block)) for block in self._counts)
        assert self._arena.num_held_pages(self._owner) == num_runs * self._run
        assert self._pages.keys() | self._groups.keys() <= self._counts.keys()
