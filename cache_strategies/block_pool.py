"""The blocks one instance holds, with reference counts. Knows the arena; not tokens, keys or who refers.

A block with no references is either given back or, if its owner wants it kept, idle: still filled, oldest first in line
to be given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kernels.arena import Arena


class BlockPool:
    """Block ids (the number of the first page) and how many seats refer to each."""

    def __init__(self, arena: Arena, owner: str, run: int, *, keep: Callable[[int], bool]) -> None:
        """`keep(block)` says whether a block without references stays as idle."""
        self._arena = arena
        self._owner = owner
        self._run = run
        self._keep = keep
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def take(self) -> int | None:
        """A block with one reference; None: no room."""
        block = self._arena.take(self._owner, self._run)
        if block is not None:
            self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference."""
        self._references[block] += 1
        self._idle.pop(block, None)

    def drop(self, block: int) -> None:
        """One reference less; without any, the block is idle or gone."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._keep(block):
            self._idle[block] = None
        else:
            self._free(block)

    def shared(self, block: int) -> bool:
        return self._references[block] > 1

    def oldest_idle(self) -> int | None:
        return next(iter(self._idle), None)

    def evict(self, block: int) -> None:
        """An idle block goes back to the arena."""
        del self._idle[block]
        self._free(block)

    def _free(self, block: int) -> None:
        del self._references[block]
        self._arena.give(self._owner, block, self._run)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __len__(self) -> int:
        return len(self._references)

    def check_integrity(self, references: dict[int, int]) -> None:
        """`references`: those that the caller knows of, by block."""
        counted = {block: n for block, n in self._references.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert set(self._idle) == {block for block, n in self._references.items() if not n}
        assert self._arena.held(self._owner) == len(self._references) * self._run
