"""Which idle entry goes first: one that has expired, then the lowest priority, then as the policy says.

Knows entries by key, like the policies; neither blocks nor seats.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cache_strategies.eviction.base import EvictionPolicy, Key


class Retention(NamedTuple):
    """How long an entry is worth keeping."""

    priority: int  # higher ones stay longer
    expires: float  # seconds on the clock; from then on it goes before everything else


class EvictionQueue:
    """Idle entries in the order in which they go; a policy of its own for each priority."""

    def __init__(self, policy: Callable[[], EvictionPolicy], clock: Callable[[], float] = time.monotonic) -> None:
        self._new_policy = policy
        self._clock = clock
        self._policies: dict[int, EvictionPolicy] = {}
        self._retention: dict[Key, Retention] = {}  # of all entries, in use or idle
        self._idle: set[Key] = set()
        self._expiry = _ExpiryHeap(self._retention)

    def update_retention(self, key: Key, priority: int = 0, ttl: float = math.inf) -> None:
        """Set what an entry in use is worth to a user that leaves it; the most that any user set holds."""
        assert key not in self._idle
        new = Retention(priority, self._clock() + ttl)
        old = self._retention.setdefault(key, new)
        merged = Retention(max(old.priority, priority), max(old.expires, new.expires))
        if old.priority != merged.priority:
            self._get_policy(key).discard(key)
        self._retention[key] = merged

    def insert(self, key: Key, size: int) -> None:
        """Add an entry that nobody uses any more; update_retention() was called for it."""
        self._idle.add(key)
        self._get_policy(key).insert(key, size, self._clock())
        self._expiry.watch(key)

    def touch(self, key: Key) -> None:
        """Note that an idle entry is wanted again; it is in use until it is inserted once more."""
        self._idle.remove(key)
        self._get_policy(key).touch(key, self._clock())

    def evict(self) -> Key:
        """Remove the entry that goes first and return it. Called only while there is an idle one."""
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
        """Remove an entry for another reason; one that is not known is not an error."""
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
    """When entries expire: the note of each that holds is the soonest, and is looked at no sooner than it is due."""

    def __init__(self, retention: Mapping[Key, Retention]) -> None:
        self._retention = retention
        self._heap: list[tuple[float, int, Key]] = []  # a heap; the number keeps it from comparing keys
        self._due_times: dict[Key, float] = {}  # when the note that holds is due
        self._num_pushed = 0

    def watch(self, key: Key) -> None:
        expires = self._retention[key].expires
        if expires >= self._due_times.get(key, math.inf):
            return
        if len(self._heap) > 2 * len(self._retention) + 64:  # mostly of entries that are gone
            self._heap = [note for note in self._heap if note[2] in self._retention and self._is_current(note)]
            self._due_times = {key: due for due, _, key in self._heap}
            heapq.heapify(self._heap)
        self._push(expires, key)

    def pop_expired(self, now: float) -> Iterator[Key]:
        """Yield entries that have expired; each once, until it is watched again."""
        while self._heap and self._heap[0][0] <= now:
            note = heapq.heappop(self._heap)
            if not self._is_current(note):
                continue
            key = note[2]
            del self._due_times[key]
            expires = self._retention[key].expires if key in self._retention else math.inf
            if expires <= now:
                yield key
            elif expires < math.inf:  # it has got more time since
                self._push(expires, key)

    def _push(self, expires: float, key: Key) -> None:
        self._num_pushed += 1
        self._due_times[key] = expires
        heapq.heappush(self._heap, (expires, self._num_pushed, key))

    def _is_current(self, note: tuple[float, int, Key]) -> bool:
        return self._due_times.get(note[2]) == note[0]
