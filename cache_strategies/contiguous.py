"""contiguous: one run of memory a sequence, long enough for max_seq_len. The baseline: exact, simple, generous.

A sequence's keys of one layer are one dense tensor, which `view` hands out without a copy. The run of a closed sequence
stays with its text as long as nobody else needs the memory: a later sequence takes the one it has most in common with,
and goes on behind what they share (as llama.cpp's slots do). Two that run at once share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cache_strategies.base import (
    KEEPS_EVERYTHING,
    BlockEvents,
    Blocks,
    CacheSetup,
    CacheUsage,
    Geometry,
    Miss,
    Plan,
    Seat,
    covers,
    tenant_of,
    usable,
)
from cache_strategies.block_table import TableOptions, TableSeat
from cache_strategies.eviction.lru import LRU
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.paged.block_metrics import BlockMetrics
from cache_strategies.single_block import SlabCache

Ids = NDArray[np.int64]


class ContiguousOptions(TableOptions):
    """Options of a contiguous cache."""

    prefix_cache: bool = Field(True, description="go on from a closed sequence with the same beginning")
    ttl: float | None = Field(None, gt=0, description="seconds after which what it left goes before all others")


class ContiguousSeat(TableSeat):
    """A seat that knows its committed tokens, for whoever comes after it."""

    __slots__ = ("priority", "salt", "tokens", "ttl")

    def __init__(self, index: int, blocks: list[int], length: int = 0) -> None:
        super().__init__(index, blocks, length)
        self.tokens: list[int] = []
        self.salt: str | None = None  # None: nobody shall go on from here
        self.priority = 0  # what it leaves is worth this much,
        self.ttl = math.inf  # for so many seconds


@dataclass(frozen=True, eq=False)
class Idle:
    """What a closed sequence left."""

    tokens: Ids
    salt: str


class ContiguousCache(SlabCache):
    """Slots are positions."""

    options_type = ContiguousOptions
    seat_type = ContiguousSeat

    def __init__(self, setup: CacheSetup, options: ContiguousOptions) -> None:
        super().__init__(setup, options)
        self.prefix_cache = options.prefix_cache
        self._ttl = math.inf if options.ttl is None else options.ttl
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.rounds, reusable=self.prefix_cache)
        self._idle: dict[int, Idle] = {}  # by block, the oldest first
        self._eviction_queue = EvictionQueue(LRU, setup.clock)  # the same blocks, in the order in which they go
        self._block_metrics = BlockMetrics(setup.clock)  # of all blocks

    @classmethod
    def block_plan(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1

    # ---------------------------------------------------------------- open, close
    def match(self, tokens: Sequence[int], *, salt: str = "", max_cached: int | None = None) -> int:
        return self._find(tokens, salt, max_cached)[1]

    def open(self, tokens: Sequence[int], *, salt: str = "", max_cached: int | None = None) -> Seat | None:
        if self.table.full:
            return None
        block, common = self._find(tokens, salt, max_cached)
        if block is None:
            seat = self._open(0)
        else:
            self._forget(block)
            self._block_metrics.reused(block)
            seat = self._seat(block, common)
        if seat is None:
            return None
        assert isinstance(seat, ContiguousSeat)
        seat.ttl = self._ttl
        seat.tokens, seat.salt = list(tokens[:common]), salt if self.prefix_cache else None
        seat.miss = self._why_no_more(tokens, salt, common, max_cached)
        return seat

    def close(self, seat: Seat) -> None:
        assert isinstance(seat, ContiguousSeat)
        tokens = np.array(seat.tokens[: seat.length], np.int64)
        known = _common(tokens >= 0, np.ones(len(tokens), bool))  # up to the first embedding, which has no name
        if seat.salt is None or not known:
            self._block_metrics.gone(seat.blocks[0])
            super().close(seat)
            return
        self.seats.remove(seat)
        self.table.give(seat.index)
        block = seat.blocks.pop()
        self._idle[block] = Idle(tokens[:known], seat.salt)
        self._eviction_queue.keep(block, seat.priority, seat.ttl)
        self._eviction_queue.insert(block, self.bytes_per_block)
        self._block_metrics.idle(block)

    def discard(self, seat: Seat) -> None:
        assert isinstance(seat, ContiguousSeat)
        seat.salt = None

    def _open(self, length: int) -> TableSeat | None:
        seat = super()._open(length)
        if seat is not None:
            self._block_metrics.born(seat.blocks[0])
        return seat

    def retain(self, seat: Seat, *, priority: int, ttl: float | None) -> None:
        assert isinstance(seat, ContiguousSeat)
        seat.priority, seat.ttl = priority, self._ttl if ttl is None else ttl

    def _find(self, tokens: Sequence[int], salt: str, max_cached: int | None) -> tuple[int | None, int]:
        """The block of the idle text to go on from, and the tokens in common; the latest of several equal ones.

        One of which more than half would be lost is left alone while there is other memory.
        """
        ids, most = np.array(tokens, np.int64), usable(tokens, max_cached)
        best, longest = None, 0
        for block, left in self._idle.items():
            common = min(most, _common(left.tokens, ids)) if left.salt == salt else 0
            if common and common >= longest:
                best, longest = block, common
        if best is None:
            return None, 0
        loses_most = 2 * longest < len(self._idle[best].tokens)
        return (None, 0) if loses_most and self.setup.arena.has_room(self.name, self.store.run) else (best, longest)

    def _forget(self, block: int) -> None:
        """Its text: the block is somebody's, or nobody's, from now on."""
        del self._idle[block]
        self._eviction_queue.discard(block)

    def _why_no_more(self, tokens: Sequence[int], salt: str, common: int, max_cached: int | None) -> Miss | None:
        if not self.prefix_cache:
            return "bypass"
        if common == usable(tokens):
            return None if common else "short"
        if common == max_cached:
            return "bypass"
        begins = list(tokens[: common + 1])
        seats = (seat for seat in self.seats if isinstance(seat, ContiguousSeat) and seat.salt == salt)
        if any(seat.tokens[: common + 1] == begins for seat in seats):
            return "busy"
        others = (left for left in self._idle.values() if left.salt != salt and tenant_of(left.salt) == tenant_of(salt))
        return "salt" if any(left.tokens[: common + 1].tolist() == begins for left in others) else "cold"

    # ---------------------------------------------------------------- while it is open
    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        super().commit(plan, tokens)
        for row, ids in zip(plan.rows, tokens, strict=True):
            assert isinstance(row.seat, ContiguousSeat)
            row.seat.tokens += ids

    def crop(self, seat: Seat, length: int) -> None:
        super().crop(seat, length)
        assert isinstance(seat, ContiguousSeat)
        del seat.tokens[length:]

    def fork(self, seat: Seat) -> Seat | None:
        child = super().fork(seat)
        if child is not None:
            assert isinstance(seat, ContiguousSeat)
            assert isinstance(child, ContiguousSeat)
            child.tokens, child.salt, child.miss = list(seat.tokens), seat.salt, seat.miss
            child.priority, child.ttl = seat.priority, seat.ttl
        return child

    # ---------------------------------------------------------------- memory of nobody
    def idle_pages(self) -> int:
        return len(self._idle) * self.store.run

    def reclaim(self, pages: int) -> int:
        given = 0
        while given < pages and self._idle:
            block = self._eviction_queue.evict()
            assert isinstance(block, int)
            del self._idle[block]
            self._block_metrics.evicted(block)
            self.setup.arena.give(self.name, block, self.store.run)
            given += self.store.run
        return given

    def clear(self, salt: str | None = None) -> int:
        gone = [block for block, left in self._idle.items() if covers(salt, left.salt)]
        for block in gone:
            self._forget(block)
            self._block_metrics.gone(block)
            self.setup.arena.give(self.name, block, self.store.run)
        for seat in self.seats:
            assert isinstance(seat, ContiguousSeat)
            if seat.salt is not None and covers(salt, seat.salt):
                seat.salt = None
        return len(gone) * self.bytes_per_block

    def usage(self) -> CacheUsage:
        """Idle memory counts in full, whatever the length of the text in it."""
        usage, idle = super().usage(), len(self._idle) * self.bytes_per_block
        return usage._replace(reserved=usage.reserved + idle, idle=idle)

    def inspect(self) -> dict[str, Any]:
        seats = [{"tokens": s.length, "cached_tokens": s.cached, "blocks": 1} for s in self.seats]
        return {"block_size": self.store.block_size, "blocks": self.blocks()._asdict(), "seats": seats}

    def blocks(self) -> Blocks:
        return super().blocks()._replace(idle=len(self._idle))

    def happened(self) -> BlockEvents | None:
        return self._block_metrics.collect()

    def check_integrity(self) -> None:
        self._eviction_queue.check_integrity()
        assert len(self._eviction_queue) == len(self._idle)
        blocks = [seat.blocks[0] for seat in self.seats] + list(self._idle)
        assert len(set(blocks)) == len(blocks)
        self._block_metrics.check_integrity(set(blocks), self._idle.keys())
        assert self.setup.arena.held(self.name) == len(blocks) * self.store.run
        for seat in self.seats:
            assert isinstance(seat, ContiguousSeat)
            assert len(seat.tokens) == seat.length <= self.setup.geometry.max_seq_len


def _common(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
