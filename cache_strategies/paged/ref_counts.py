"""Allocates an instance's blocks from the arena and counts the references to each. Knows neither tokens nor seats."""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.arena import Arena


class RefCounts:
    """The reference count of each allocated block: references of seats, pins and unfinished copies.

    A block is identified by the number of its first page.
    """

    def __init__(self, arena: Arena, owner: str, run: int) -> None:
        self._arena = arena
        self._owner = owner
        self._run = run
        self._counts: dict[int, int] = {}

    def allocate(self) -> int | None:
        """Allocate a block with one reference; None if there is not enough memory."""
        block = self._arena.allocate(self._owner, self._run)
        if block is not None:
            self._counts[block] = 1
        return block

    def incref(self, block: int) -> bool:
        """Add a reference to a block; return whether the block had none before."""
        self._counts[block] += 1
        return self._counts[block] == 1

    def decref(self, block: int) -> bool:
        """Drop a reference to a block; return whether that was its last. The block stays allocated until release()."""
        assert self._counts[block] > 0
        self._counts[block] -= 1
        return not self._counts[block]

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def release(self, block: int) -> None:
        """Free a block without references."""
        assert not self._counts[block]
        del self._counts[block]
        self._arena.release(self._owner, block, self._run)

    def __len__(self) -> int:
        return len(self._counts)

    def check_integrity(self, references: Mapping[int, int], idle: int) -> None:
        """Assert that the counts equal `references` (by block), and that exactly `idle` blocks have no reference."""
        counted = {block: n for block, n in self._counts.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert len(self._counts) == len(counted) + idle
        assert self._arena.num_held_pages(self._owner) == len(self._counts) * self._run
