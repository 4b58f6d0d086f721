"""Caches without keys: they count tokens in a shared memory, and have the contract that a test needs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.types import CacheUsage, Contract, Geometry, Text


class Memory:
    """A number of tokens that caches share; a token is one byte. It is the memory of their instances."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.num_refusals = 0
        self.caches: dict[str, FakeCache] = {}

    def set_owner(self, name: str, owner: object) -> None:
        """Do nothing: nothing is evicted."""

    def get_capacity(self, name: str) -> int:
        return self.caches[name].limit

    def count_sequence_bytes(self, name: str, num_tokens: int) -> int:
        return self.caches[name].bytes_for(num_tokens)

    def is_at_limit(self, name: str) -> bool:
        return self.caches[name].held >= self.caches[name].limit

    def is_draining(self, name: str) -> bool:
        return False

    def take(self, count: int, limit: int) -> bool:
        """Take memory, if there is enough, and no more than `limit`."""
        if count > min(self.free, limit):
            self.num_refusals += 1
            return False
        self.free -= count
        return True


class FakeSequence(KVSequence):
    """A sequence that has reserved memory for `held` tokens."""

    def __init__(self, cache: FakeCache) -> None:
        self.cache, self.held = cache, 0
        self._set_stop()

    def ready(self) -> bool:
        return self not in self.cache.not_ready

    def reserve(self, num_tokens: int) -> bool:
        assert self in self.cache.open_sequences
        assert 0 < num_tokens <= (self.cache.max_row or num_tokens)
        return self.cache.hold(self, self.cache.bytes_for(self.length + num_tokens))

    def commit(self, ids: Sequence[int]) -> NoReturn:
        raise NotImplementedError

    def close(self) -> None:
        self.cache.open_sequences.remove(self)
        self.cache.memory.free += self.held

    def _set_stop(self) -> None:
        self.stop = None if self.cache.max_row is None else self.length + self.cache.max_row

    def advance(self, num_tokens: int) -> None:
        """Count tokens as committed."""
        self.length += num_tokens
        self._set_stop()


class FakeCache(KVCache):
    """A cache that reserves memory for a prompt at open() or, if `lazy`, as it grows; always `reserve`, if given."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        *,
        max_row: int | None = None,
        replayable: bool = True,
        reserve: int | None = None,
        lazy: bool = False,
        limit: int | None = None,
    ) -> None:
        self.contract = Contract(replayable=replayable)
        self.max_row = max_row
        self.open_sequences: set[FakeSequence] = set()
        self.opens_ready = True  # whether new sequences are ready
        self.not_ready: set[KVSequence] = set()
        self._name, self.memory, self._reserve, self._lazy = name, memory, reserve, lazy
        self.limit = memory.total if limit is None else limit
        memory.caches[name] = self
        self.setup: Any = SimpleNamespace(
            memory=SimpleNamespace(shared=memory), geometry=SimpleNamespace(max_seats=1000)
        )

    @property
    def name(self) -> str:
        return self._name

    def bytes_for(self, num_tokens: int) -> int:
        return num_tokens if self._reserve is None else self._reserve

    def open(self, text: Text) -> FakeSequence | None:
        opened = FakeSequence(self)
        if not self.hold(opened, 0 if self._lazy else self.bytes_for(len(text.ids))):
            return None
        self.open_sequences.add(opened)
        if not self.opens_ready:
            self.not_ready.add(opened)
        return opened

    def hold(self, sequence: FakeSequence, wanted: int) -> bool:
        """Take the memory that a sequence lacks; return False if there is not enough."""
        more = max(0, wanted - sequence.held)
        if not self.memory.take(more, self.limit - self.held):
            return False
        sequence.held += more
        return True

    def usage(self) -> CacheUsage:
        held = self.held
        return CacheUsage(len(self.open_sequences), held, held, held, 0, 0, self.limit)

    @property
    def held(self) -> int:
        return sum(each.held for each in self.open_sequences)

    # ---------------------------------------------------------------- of no concern to a scheduler
    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> NoReturn:
        raise NotImplementedError

    def locate(self, rows: Rows) -> NoReturn:
        raise NotImplementedError

    def check_integrity(self) -> None:
        assert self.held <= self.limit
