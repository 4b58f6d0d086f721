"""The order of eviction: expired entries first, then those of the lowest priority, as an eviction policy orders them.

An entry is a cached block, known by its key. Knows neither blocks nor sequences.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cache_strategies.eviction.base import EvictionPolicy, Key


class Retention(NamedTuple):
    """How long an idle entry is kept: its priority and the time at which it expires."""

    priority: int  # entries of higher priority are evicted later
    expires: float  # time, in seconds on the queue's clock, from which the entry is evicted before all others


class EvictionQueue:
    """The idle entries in the order of their eviction; uses one policy object for each priority."""

    def __init__(self, policy: Callable[[], EvictionPolicy], clock: Callable[[], float] = time.monotonic) -> None:
        self._new_policy = policy
        self._clock = clock
        self._policies: dict[int, EvictionPolicy] = {}
        self._retention: dict[Key, Retention] = {}  # priority and expiry of all entries, in use and idle
        self._idle: set[Key] = set()
        self._expiry = _ExpiryHeap(self._retention)

    def update_retention(self, key: Key, priority: int = 0, ttl: float = math.inf) -> None:
        """Raise the priority of an entry in use to `priority`, and its expiry to `ttl` seconds from now.

        Neither is ever lowered. Called each time that a sequence or a pin releases the entry: the highest values
        apply.
        """
        assert key not in self._idle
        new = Retention(priority, self._clock() + ttl)
        old = self._retention.setdefault(key, new)
        merged = Retention(max(old.priority, priority), max(old.expires, new.expires))
        if old.priority != merged.priority:
            self._get_policy(key).discard(key)
        self._retention[key] = merged

    def insert(self, key: Key, size: int) -> None:
        """Add an entry of `size` bytes that becomes idle; update_retention() must have been called for it."""
        self._idle.add(key)
        self._get_policy(key).insert(key, size, self._clock())
        self._expiry.watch(key)

    def touch(self, key: Key) -> None:
        """Record that an idle entry is reused; it is in use until it is inserted again."""
        self._idle.remove(key)
        self._get_policy(key).touch(key, self._clock())

    def evict(self) -> Key:
        """Remove the idle entry that is to be evicted next; return its key. Called only if an entry is idle."""
        for key in self._expiry.pop_expired(self._clock()):
            if key in self._idle:
                self.discard(key)
                return key
        lowest = min(priority for priority, policy in self._policies.items() if len(policy))
        key = self._policies[lowest].evict()
        self._idle.remove(key)
        del self._retention[key]
        return key

    def discard(self, key: Key) -> None:
        """Remove an entry, idle or in use, that is freed without being evicted. Unknown keys are ignored."""
        if key in self._retention:
            self._get_policy(key).discard(key)
            del self._retention[key]
            self._idle.discard(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._idle

    def __len__(self) -> int:
        return len(self._idle)

    def check_integrity(self) -> None:
        assert sum(map(len, self._policies.values())) == len(self._idle)
        assert self._idle <= self._retention.keys()

    def _get_policy(self, key: Key) -> EvictionPolicy:
        priority = self._retention[key].priority
        if priority not in self._policies:
            self._policies[priority] = self._new_policy()
        return self._policies[priority]


class _ExpiryHeap:
    """A heap of the entries' expiry times with lazy deletion: outdated items of an entry are skipped when popped."""

    def __init__(self, retention: Mapping[Key, Retention]) -> None:
        self._retention = retention
        self._heap: list[tuple[float, int, Key]] = []  # (expiry time, counter, key); the counter orders equal times
        self._due_times: dict[Key, float] = {}  # expiry time in the current heap item of each key
        self._num_pushed = 0

    def watch(self, key: Key) -> None:
        expires = self._retention[key].expires
        if expires >= self._due_times.get(key, math.inf):
            return
        if len(self._heap) > 2 * len(self._retention) + 64:  # rebuild the heap: most items are outdated
            self._heap = [item for item in self._heap if item[2] in self._retention and self._is_current(item)]
            self._due_times = {key: due for due, _, key in self._heap}
            heapq.heapify(self._heap)
        self._push(expires, key)

    def pop_expired(self, now: float) -> Iterator[Key]:
        """Yield the keys of entries that have expired; each only once, until watch() is called for it again."""
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)
            if not self._is_current(item):
                continue
            key = item[2]
            del self._due_times[key]
            expires = self._retention[key].expires if key in self._retention else math.inf
            if expires <= now:
                yield key
            elif expires < math.inf:  # the entry's expiry was raised after this heap item was pushed
                self._push(expires, key)

    def _push(self, expires: float, key: Key) -> None:
        self._num_pushed += 1
        self._due_times[key] = expires
        heapq.heappush(self._heap, (expires, self._num_pushed, key))

    def _is_current(self, item: tuple[float, int, Key]) -> bool:
        return self._due_times.get(item[2]) == item[0]
