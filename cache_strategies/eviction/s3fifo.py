"""s3fifo: what was wanted only once goes soon, so that a flood of texts nobody repeats cannot wash out the others.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): new entries pass a small queue, and
only those that were wanted again come into the main one; keys that the small queue let go are remembered for a while,
and enter the main queue when they return. An entry that is in use stands in no queue, so a hit moves it at once instead
of marking it: nothing in use has to be passed over when room is made.
"""

from __future__ import annotations

from collections import OrderedDict

from cache_strategies.eviction.base import EvictionPolicy, Key

SMALL = 0.1  # share of idle bytes that new entries may hold
MOST_USES = 3  # that are counted


class S3FIFO(EvictionPolicy):
    """Two queues, and keys that were let go."""

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()  # sizes
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._uses: dict[Key, int] = {}  # of entries that were wanted again
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, size: int, now: float) -> None:
        if key in self._uses or key in self._ghosts:
            self._ghosts.pop(key, None)
            self._main[key] = size
            self._main_bytes += size
        else:
            self._small[key] = size
            self._small_bytes += size

    def touch(self, key: Key, now: float) -> None:
        self._take(key)
        self._uses[key] = min(self._uses.get(key, 0) + 1, MOST_USES)

    def evict(self) -> Key:
        if self._small and (not self._main or self._small_bytes > SMALL * (self._small_bytes + self._main_bytes)):
            key = next(iter(self._small))
            self._take(key)
            self._remember(key)
            return key
        while True:
            key = next(iter(self._main))
            if not self._uses.get(key):
                self.discard(key)
                return key
            self._uses[key] -= 1
            self._main.move_to_end(key)

    def discard(self, key: Key) -> None:
        self._take(key)
        self._uses.pop(key, None)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _take(self, key: Key) -> None:
        """Out of its queue."""
        self._small_bytes -= self._small.pop(key, 0)
        self._main_bytes -= self._main.pop(key, 0)

    def _remember(self, key: Key) -> None:
        """As many keys as there are idle entries."""
        self._ghosts[key] = None
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)
