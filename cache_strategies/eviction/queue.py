"""Who goes first, whatever the policy: what has outlived its time, then the lowest priority, then as the policy says.

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

    def keep(self, key: Key, priority: int = 0, ttl: float = math.inf) -> None:
        """Somebody who leaves an entry in use says what it is worth; the most that was said of it holds."""
        assert key not in self._idle
        wanted = Retention(priority, self._clock() + ttl)
        before = self._retention.setdefault(key, wanted)
        now = Retention(max(before.priority, priority), max(before.expires, wanted.expires))
        if before.priority != now.priority:
            self._policy(key).discard(key)
        self._retention[key] = now

    def insert(self, key: Key, size: int) -> None:
        """Nobody uses the entry any more, which was said to be worth keeping."""
        self._idle.add(key)
        self._policy(key).insert(key, size, self._clock())
        self._expiry.watch(key)

    def touch(self, key: Key) -> None:
        """It is wanted again."""
        self._idle.remove(key)
        self._policy(key).touch(key, self._clock())

    def evict(self) -> Key:
        """Takes out who goes first. Asked only while there is an idle entry."""
        for key in self._expiry.over(self._clock()):
            if key in self._idle:
                self.discard(key)
                return key
        lowest = min(priority for priority, policy in self._policies.items() if len(policy))
        key = self._policies[lowest].evict()
        self._idle.remove(key)
        del self._retention[key]
        return key

    def discard(self, key: Key) -> None:
        """It is gone for another reason; one that is not known is no error."""
        if key in self._retention:
            self._policy(key).discard(key)
            del self._retention[key]
            self._idle.discard(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._idle

    def __len__(self) -> int:
        return len(self._idle)

    def check_integrity(self) -> None:
        assert sum(map(len, self._policies.values())) == len(self._idle)
        assert self._idle <= self._retention.keys()

    def _policy(self, key: Key) -> EvictionPolicy:
        priority = self._retention[key].priority
        if priority not in self._policies:
            self._policies[priority] = self._new_policy()
        return self._policies[priority]


class _ExpiryHeap:
    """When entries expire: the note of each that holds is the soonest, and is looked at no sooner than it is due."""

    def __init__(self, retention: Mapping[Key, Retention]) -> None:
        self._retention = retention
        self._due: list[tuple[float, int, Key]] = []  # a heap; the number keeps it from comparing keys
        self._noted: dict[Key, float] = {}  # when the note that holds is due
        self._notes = 0

    def watch(self, key: Key) -> None:
        expires = self._retention[key].expires
        if expires >= self._noted.get(key, math.inf):
            return
        if len(self._due) > 2 * len(self._retention) + 64:  # mostly of entries that are gone
            self._due = [note for note in self._due if note[2] in self._retention and self._holds(note)]
            self._noted = {key: due for due, _, key in self._due}
            heapq.heapify(self._due)
        self._note(expires, key)

    def over(self, now: float) -> Iterator[Key]:
        """Entries whose time is over; each is told once, and forgotten until it is watched again."""
        while self._due and self._due[0][0] <= now:
            note = heapq.heappop(self._due)
            if not self._holds(note):
                continue
            key = note[2]
            del self._noted[key]
            expires = self._retention[key].expires if key in self._retention else math.inf
            if expires <= now:
                yield key
            elif expires < math.inf:  # it has got more time since
                self._note(expires, key)

    def _note(self, expires: float, key: Key) -> None:
        self._notes += 1
        self._noted[key] = expires
        heapq.heappush(self._due, (expires, self._notes, key))

    def _holds(self, note: tuple[float, int, Key]) -> bool:
        return self._noted.get(note[2]) == note[0]
