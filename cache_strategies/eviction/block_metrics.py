"""Measures an instance's blocks: their lifetimes, idle times and reuse gaps in seconds, and the number of copies.

Knows a block by a key, which is its number or its hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Set

from cache_strategies.types import BlockEvents

Key = Hashable
MAX_SAMPLES = 1024  # maximum number of durations of each kind that wait for collect(); older ones are dropped


class BlockMetrics:
    """Records events of blocks: each is allocated, then alternately idle and reused, then evicted or removed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._allocated_at: dict[Key, float] = {}
        self._idle_since: dict[Key, float] = {}
        self._lifetimes: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._idle_times: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._reuse_gaps: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._copies = 0
        self.evicted_used_at: float | None = None  # when the block that was evicted last had been used last

    def on_block_allocated(self, key: Key) -> None:
        self._allocated_at[key] = self._clock()

    def on_block_idle(self, key: Key) -> None:
        self._idle_since[key] = self._clock()

    def on_block_reused(self, key: Key) -> None:
        self._reuse_gaps.append(self._clock() - self._idle_since.pop(key))

    def on_block_evicted(self, key: Key) -> None:
        now = self._clock()
        self._lifetimes.append(now - self._allocated_at.pop(key))
        self.evicted_used_at = self._idle_since.pop(key)
        self._idle_times.append(now - self.evicted_used_at)

    def on_block_removed(self, key: Key) -> None:
        """Record that a block, idle or in use, was removed without being evicted."""
        del self._allocated_at[key]
        self._idle_since.pop(key, None)

    def on_block_copied(self) -> None:
        """Record that a shared block was copied before a write (copy-on-write)."""
        self._copies += 1

    def measure(self, key: Key) -> tuple[float, float | None]:
        """Return the seconds since a block was allocated, and since it became idle (None: it is in use)."""
        now, idle_since = self._clock(), self._idle_since.get(key)
        return now - self._allocated_at[key], None if idle_since is None else now - idle_since

    def collect(self) -> BlockEvents | None:
        """Return the block events since the last call, and clear them; None if there were none."""
        if not (self._lifetimes or self._reuse_gaps or self._copies):
            return None
        events = BlockEvents(self._copies, tuple(self._lifetimes), tuple(self._idle_times), tuple(self._reuse_gaps))
        self._copies = 0
        for samples in (self._lifetimes, self._idle_times, self._reuse_gaps):
            samples.clear()
        return events

    def check_integrity(self, known: Set[Key], idle: Set[Key]) -> None:
        """Assert that `known` has the keys of all blocks that are being measured, and `idle` those of the idle ones."""
        assert self._allocated_at.keys() == known
        assert self._idle_since.keys() == idle
