"""Caches without keys: they count tokens in a shared memory, and have the contract that a test needs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.types import NO_SALT, CacheUsage, Contract, Geometry, Salt


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


class FakeSeat(Seat):
    """A seat that has reserved memory for `held` tokens."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        super().__init__()
        self.held = 0


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
        self.contract = Contract(
            exact=True,
            forkable=False,
            rewind=None,
            replayable=replayable,
            chunk_invariant=True,
            max_row=max_row,
        )
        self.open_seats: set[FakeSeat] = set()
        self.opens_ready = True  # whether new seats are ready
        self.not_ready: set[Seat] = set()
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

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> Seat | None:
        seat = FakeSeat()
        if not self._hold(seat, 0 if self._lazy else self.bytes_for(len(tokens))):
            return None
        self.open_seats.add(seat)
        if not self.opens_ready:
            self.not_ready.add(seat)
        return seat

    def ready(self, seat: Seat) -> bool:
        return seat not in self.not_ready

    def grow(self, seat: Seat, num_tokens: int) -> bool:
        assert isinstance(seat, FakeSeat)
        assert seat in self.open_seats
        assert 0 < num_tokens <= (self.contract.max_row or num_tokens)
        return self._hold(seat, self.bytes_for(seat.length + num_tokens))

    def close(self, seat: Seat) -> None:
        assert isinstance(seat, FakeSeat)
        self.open_seats.remove(seat)
        self.memory.free += seat.held

    def usage(self) -> CacheUsage:
        held = self.held
        return CacheUsage(len(self.open_seats), held, held, held, 0, 0, self.limit)

    @property
    def held(self) -> int:
        return sum(seat.held for seat in self.open_seats)

    def _hold(self, seat: FakeSeat, wanted: int) -> bool:
        more = max(0, wanted - seat.held)
        if not self.memory.take(more, self.limit - self.held):
            return False
        seat.held += more
        return True

    # ---------------------------------------------------------------- of no concern to a scheduler
    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> NoReturn:
        raise NotImplementedError

    def crop(self, seat: Seat, length: int) -> NoReturn:
        raise NotImplementedError

    def plan(self, rows: Sequence[Row]) -> NoReturn:
        raise NotImplementedError

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> NoReturn:
        raise NotImplementedError

    def check_integrity(self) -> None:
        assert self.held <= self.limit
