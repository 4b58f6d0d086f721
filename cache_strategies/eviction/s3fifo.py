"""s3fifo: an eviction policy that evicts blocks that were used only once before blocks that were reused.

Prompts that occur only once, however many, do not evict the prefixes that are used again.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). New entries enter a small queue; those
that are hit there move to the main queue. Keys evicted from the small queue are remembered for a while (ghosts), and
enter the main queue if they return. This implementation differs in two ways. An entry in use is in neither queue, so
the main queue is in the order of use without reference bits or second chances, as in 2Q (Johnson and Shasha 1994). And
the small queue is larger than in the paper: a chat's next message comes minutes later and should still find its prefix.
"""

from __future__ import annotations

from collections import OrderedDict

from cache_strategies.eviction.base import EvictionPolicy, Key

SMALL_QUEUE_SHARE = 0.3  # share of the idle bytes in the small queue; hit rates hardly differ from 0.25 to 0.4


class S3FIFO(EvictionPolicy):
    """A small queue for new entries, a main queue for entries used again, and a list of recently evicted keys."""

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()  # bytes of each entry
        self._main: OrderedDict[Key, int] = OrderedDict()  # bytes of each entry
        self._small_bytes = self._main_bytes = 0
        self._main_keys: set[Key] = set()  # keys of the main queue, and of entries in use that return to it
        self._ghosts: OrderedDict[Key, None] = OrderedDict()  # keys evicted from the small queue, oldest first

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
        """Remove an idle entry from its queue; do nothing for an entry in use."""
        self._small_bytes -= self._small.pop(key, 0)
        self._main_bytes -= self._main.pop(key, 0)

    def _add_ghost(self, key: Key) -> None:
        """Remember an evicted entry's key; forget the oldest remembered ones if they outnumber the idle entries."""
        self._ghosts[key] = None
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)
