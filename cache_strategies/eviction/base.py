"""The interface of an eviction policy. Knows keys, sizes and times of entries; neither tokens nor memory.

An entry is a cached block of keys and values, identified by a key (its hash or its number). It is either in use, and
cannot be evicted, or idle, and then the policy decides when it is evicted. Priorities and times to live are handled by
`EvictionQueue`, in the same way for all policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

Key = Hashable


class EvictionPolicy(ABC):
    """Chooses which idle entry (cached block) is evicted next. Methods must take amortised constant time."""

    @abstractmethod
    def insert(self, key: Key, size: int, now: float) -> None:
        """Add an entry that becomes idle: a new one, or one that was in use. `size` is in bytes, `now` in seconds."""

    @abstractmethod
    def touch(self, key: Key, now: float) -> None:
        """Record that an idle entry is reused; it is in use until it is inserted again. `now` is in seconds."""

    @abstractmethod
    def evict(self) -> Key:
        """Remove the idle entry that is to be evicted next; return its key. Called only if an entry is idle."""

    @abstractmethod
    def discard(self, key: Key) -> None:
        """Remove an entry, idle or in use, that is freed without being evicted. Unknown keys are ignored."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of idle entries."""
