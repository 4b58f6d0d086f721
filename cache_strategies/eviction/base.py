"""What an eviction policy is. Knows keys, sizes and times; neither tokens, nor memory, nor who uses what.

An entry is something worth keeping that somebody may want again: a block of keys and values under its hash. While it is
in use it cannot go; when nobody uses it, it is idle, and stands in the policy's order. Priorities, times to live and
pins are not a policy's business: `queue.py` sees to them for all policies alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

Key = Hashable


class EvictionPolicy(ABC):
    """An order among idle entries. Every method takes constant time, amortised."""

    @abstractmethod
    def insert(self, key: Key, size: int, now: float) -> None:
        """Add an entry that is idle from now on: new, or in use until now. `size` in bytes, `now` in seconds."""

    @abstractmethod
    def touch(self, key: Key, now: float) -> None:
        """Note that an idle entry is wanted again: a hit. It is in use until it is inserted once more."""

    @abstractmethod
    def evict(self) -> Key:
        """Remove the entry that goes first and return it. Called only while there is an idle one."""

    @abstractmethod
    def discard(self, key: Key) -> None:
        """Remove an entry, idle or in use, for another reason. One that was never inserted is not an error."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of idle entries."""
