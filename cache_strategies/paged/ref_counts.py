"""The blocks one instance holds, with reference counts. Knows the arena; not tokens, keys, or who refers."""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.arena import Arena


class RefCounts:
    """Block ids (the number of the first page) and how many refer to each: seats, copies under way, pins."""

    def __init__(self, arena: Arena, owner: str, run: int) -> None:
        self._arena = arena
        self._owner = owner
        self._run = run
        self._counts: dict[int, int] = {}

    def take(self) -> int | None:
        """Return a block with one reference; None if there is no room."""
        block = self._arena.take(self._owner, self._run)
        if block is not None:
            self._counts[block] = 1
        return block

    def incref(self, block: int) -> bool:
        """Add a reference; return whether it is the first."""
        self._counts[block] += 1
        return self._counts[block] == 1

    def decref(self, block: int) -> bool:
        """Drop a reference; return whether it was the last. The block stays until it is released."""
        assert self._counts[block] > 0
        self._counts[block] -= 1
        return not self._counts[block]

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def release(self, block: int) -> None:
        """Give a block without references back to the arena."""
        assert not self._counts[block]
        del self._counts[block]
        self._arena.release(self._owner, block, self._run)

    def __len__(self) -> int:
        return len(self._counts)

    def check_integrity(self, references: Mapping[int, int], idle: int) -> None:
        """Assert that the counts are the caller's `references`, by block, and that `idle` blocks have none."""
        counted = {block: n for block, n in self._counts.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert len(self._counts) == len(counted) + idle
        assert self._arena.num_held_pages(self._owner) == len(self._counts) * self._run
