"""lru: evicts the least recently used entry first."""

from __future__ import annotations

from collections import OrderedDict

from cache_strategies.eviction.base import EvictionPolicy, Key


class LRU(EvictionPolicy):
    """A policy with a queue of idle entries, in the order in which they became idle; evicts the first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, size: int, now: float) -> None:
        self._idle[key] = None

    def touch(self, key: Key, now: float) -> None:
        del self._idle[key]

    def evict(self) -> Key:
        return self._idle.popitem(last=False)[0]

    def discard(self, key: Key) -> None:
        self._idle.pop(key, None)

    def __len__(self) -> int:
        return len(self._idle)
