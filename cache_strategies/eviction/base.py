"""The interface of an eviction policy. Knows keys, sizes and times; neither tokens nor memory.

An entry is a cached block of keys and values, identified by its hash. It is either in use, and cannot be evicted, or
idle, and then the policy decides when it is evicted. Priorities, times to live and pins are handled outside, for all
policies alike (`queue.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

Key = Hashable


class EvictionPolicy(ABC):
    """Chooses which idle entry is evicted next. Every method must take constant time, amortised."""

    @abstractmethod
    def insert(self, key: Key, size: int, now: float) -> None:
        """Add an entry that becomes idle: new, or in use until now. `size` is in bytes, `now` in seconds."""

    @abstractmethod
    def touch(self, key: Key, now: float) -> None:
        """Record a hit on an idle entry, which is in use until it is inserted again. `now` is in seconds."""

    @abstractmethod
    def evict(self) -> Key:
        """Remove the idle entry to evict next and return its key. Called only if there is one."""

    @abstractmethod
    def discard(self, key: Key) -> None:
        """Remove an entry, idle or in use, that is freed for another reason. Unknown keys are ignored."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of idle entries."""
