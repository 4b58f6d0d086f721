"""s3fifo: what was wanted only once goes soon, so that a flood of texts nobody repeats cannot wash out the others.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): new entries pass a small queue, and
only those that were wanted again come into the main one; keys that the small queue let go are remembered for a while,
and enter the main queue when they return. Two things are otherwise here. An entry that is in use stands in no queue, so
the main one is in the order of use without marks or second chances, as in its ancestor 2Q (Johnson and Shasha 1994).
And the small queue is not so small: the next turn of a chat comes minutes later, and has to find the one before.
"""

from __future__ import annotations

from collections import OrderedDict

from cache_strategies.eviction.base import EvictionPolicy, Key

SMALL_QUEUE_SHARE = 0.3  # share of idle bytes that new entries may hold; between 0.25 and 0.4 it hardly matters


class S3FIFO(EvictionPolicy):
    """Two queues, and keys that were let go."""

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()  # sizes
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._main_keys: set[Key] = set()  # entries of the main queue, and those in use that belong there
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, size: int, now: float) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main_keys.add(key)
        if key in self._main_keys:
            self._main[key] = size
            self._main_bytes += size
        else:
            self._small[key] = size
            self._small_bytes += size

    def touch(self, key: Key, now: float) -> None:
        self._remove_from_queues(key)
        self._main_keys.add(key)

    def evict(self) -> Key:
        if self._small and (
            not self._main or self._small_bytes > SMALL_QUEUE_SHARE * (self._small_bytes + self._main_bytes)
        ):
            key = next(iter(self._small))
            self._remove_from_queues(key)
            self._add_ghost(key)
        else:
            key = next(iter(self._main))
            self.discard(key)
        return key

    def discard(self, key: Key) -> None:
        self._remove_from_queues(key)
        self._main_keys.discard(key)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _remove_from_queues(self, key: Key) -> None:
        """Remove an entry from the queue that it is in, if any."""
        self._small_bytes -= self._small.pop(key, 0)
        self._main_bytes -= self._main.pop(key, 0)

    def _add_ghost(self, key: Key) -> None:
        """Remember a key that was evicted: as many keys as there are idle entries."""
        self._ghosts[key] = None
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)
