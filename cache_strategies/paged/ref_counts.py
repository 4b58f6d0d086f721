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
        self._references: dict[int, int] = {}

    def take(self) -> int | None:
        """A block with one reference; None: no room."""
        block = self._arena.take(self._owner, self._run)
        if block is not None:
            self._references[block] = 1
        return block

    def hold(self, block: int) -> bool:
        """One more reference; whether it is the first."""
        self._references[block] += 1
        return self._references[block] == 1

    def drop(self, block: int) -> bool:
        """One reference less; whether it was the last. The block stays until it is given back."""
        assert self._references[block] > 0
        self._references[block] -= 1
        return not self._references[block]

    def shared(self, block: int) -> bool:
        return self._references[block] > 1

    def give(self, block: int) -> None:
        """A block without references, back to the arena."""
        assert not self._references[block]
        del self._references[block]
        self._arena.give(self._owner, block, self._run)

    def __len__(self) -> int:
        return len(self._references)

    def check_integrity(self, references: Mapping[int, int], idle: int) -> None:
        """`references`: those that the caller knows of, by block; `idle`: how many blocks it keeps without any."""
        counted = {block: n for block, n in self._references.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert len(self._references) == len(counted) + idle
        assert self._arena.held(self._owner) == len(self._references) * self._run
