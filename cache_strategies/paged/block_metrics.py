"""Measures the blocks of an instance: how long they live and wait to be used again, and how many are copied.

Knows entries by key, like the eviction policies: blocks, or their names. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Set

from cache_strategies.base import BlockEvents

Key = Hashable
LATEST = 1024  # figures of a kind that are kept


class BlockMetrics:
    """Takes the events of each entry, in this order: born, then idle and reused any number of times, evicted or gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born: dict[Key, float] = {}
        self._idle_since: dict[Key, float] = {}
        self._lifetimes: deque[float] = deque(maxlen=LATEST)
        self._idle_times: deque[float] = deque(maxlen=LATEST)
        self._reuse_gaps: deque[float] = deque(maxlen=LATEST)
        self._copies = 0

    def born(self, key: Key) -> None:
        self._born[key] = self._clock()

    def idle(self, key: Key) -> None:
        self._idle_since[key] = self._clock()

    def reused(self, key: Key) -> None:
        self._reuse_gaps.append(self._clock() - self._idle_since.pop(key))

    def evicted(self, key: Key) -> None:
        now = self._clock()
        self._lifetimes.append(now - self._born.pop(key))
        self._idle_times.append(now - self._idle_since.pop(key))

    def gone(self, key: Key) -> None:
        """For another reason, in use or idle."""
        del self._born[key]
        self._idle_since.pop(key, None)

    def copied(self) -> None:
        """A block, before somebody wrote into one that others see."""
        self._copies += 1

    def collect(self) -> BlockEvents | None:
        """What there is, which is forgotten."""
        if not (self._lifetimes or self._reuse_gaps or self._copies):
            return None
        happened = BlockEvents(self._copies, tuple(self._lifetimes), tuple(self._idle_times), tuple(self._reuse_gaps))
        self._copies = 0
        for kept in (self._lifetimes, self._idle_times, self._reuse_gaps):
            kept.clear()
        return happened

    def check_integrity(self, known: Set[Key], idle: Set[Key]) -> None:
        """It was told of all entries, and of no others."""
        assert self._born.keys() == known
        assert self._idle_since.keys() == idle
