"""A cache whose every call is checked: what a strategy raises or returns wrongly becomes a StrategyError that names it.

The scheduler and the engine use strategies through guards only. A call that decides about a request raises; a call
whose failure concerns no single request (such as usage()) reports the fault and returns a harmless default. Knows
neither requests nor what follows from a fault (quarantine.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    Blocks,
    CacheUsage,
    Geometry,
    PinError,
    Salt,
    SeatShape,
    count_reusable_tokens,
)
from kernels.ops import KVLocation
from kernels.types import LayerSpec
from server.engine.isolation.calls import CallObserver, NoObserver
from server.engine.isolation.errors import StrategyError
from server.engine.isolation.results import (
    MAX_NUMBER,
    check_location,
    check_report,
    check_rows,
    check_tap,
    describe,
    describe_error,
    to_blocks,
    to_events,
    to_pages,
    to_usage,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL = 60.0  # seconds between two log messages about faults of the same method
# What `out` of a hook is filled with before the call: a NaN that no computation gives, by the size of its numbers
UNWRITTEN = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF80000DEADBEEF)}


class GuardedPlan(Plan):
    """A strategy's plan after its checks, with the addresses that it gave for each layer."""

    def __init__(self, inner: Plan, rows: Sequence[Row], locations: Sequence[KVLocation | None]) -> None:
        self.inner = inner
        self.rows = rows
        self.query_tap = inner.query_tap
        self._locations = locations

    def kv_location(self, layer_idx: int) -> KVLocation | None:
        return self._locations[layer_idx]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.inner.attend(layer_idx, q, k, v, out)

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.gather_kv(layer_idx, row)


class GuardedCache(KVCache[Seat]):
    """Implements KVCache by the calls of another cache, whose results are checked."""

    def __init__(
        self, inner: KVCache, on_fault: Callable[[StrategyError], None], calls: CallObserver | None = None
    ) -> None:
        """Guard `inner`, also as an owner of the arena's pages. `on_fault` is called with each fault, once."""
        self._on_fault = on_fault
        self._calls = calls or NoObserver()
        self._codes: dict[str, int] = {}  # numbers of methods, for `calls`
        self._log_again_at: dict[str, float] = {}  # by method: when a fault of it is logged again
        # Of the open seats, as last checked. By id: a strategy's class of seat may have no hash, or one that changes
        self._lengths: dict[int, int] = {}
        self._keeps_idle_pages = False  # whether it freed fewer idle pages than it said it could
        self.is_suspended = False
        self.setup = inner.setup
        self.replace(inner)

    def replace(self, inner: KVCache) -> None:
        """Guard another cache of the same setup from now on. No seat may be open."""
        assert not self._lengths
        self.inner, self.is_suspended, self._keeps_idle_pages = inner, False, False
        self.options, self.stores, self.contract = inner.options, inner.stores, inner.contract
        self.setup.arena.register_owner(self.name, self)

    def rebuild(self, make: Callable[[], KVCache]) -> None:
        """Guard the cache that `make` builds from now on. Raises StrategyError if that fails. No seat may be open."""
        try:
            inner = self._run("__init__", make)
        except StrategyError:
            self.setup.arena.release_all(self.name)
            raise
        finally:  # the base class has registered what may be built in part only
            self.setup.arena.register_owner(self.name, self)
        self.replace(inner)

    def suspend(self) -> None:
        """Free all memory of the guarded cache, and call it no more until replace(). No seat may be open."""
        assert not self._lengths
        self.is_suspended = True
        self.setup.arena.release_all(self.name)

    @classmethod
    def seat_shape(cls, options: Any, geometry: Geometry) -> SeatShape:
        raise NotImplementedError("a guard is made when the sizes are known")

    # ---------------------------------------------------------------- calls and faults
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the guarded cache. Raises StrategyError for any exception of it."""
        if self.is_suspended:
            raise StrategyError(self.name, method, "the instance is in quarantine")
        return self._run(method, getattr(self.inner, method), *args, **kwargs)

    def _run(self, method: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a strategy's code as a call of `method`. Raises StrategyError for any exception of it.

        SystemExit is one of them. KeyboardInterrupt comes from the user, if the engine runs without a server.
        """
        outer = self._enter(method)
        try:
            return function(*args, **kwargs)
        except (PinError, StrategyError, KeyboardInterrupt):
            raise  # PinError is the answer to an operator; a StrategyError has been reported
        except BaseException as error:
            raise self.make_fault(method, describe_error(error), error) from error
        finally:
            self._calls.leave(outer)

    def _enter(self, method: str) -> Any:
        """Record that a call begins; return what to pass to leave() of the observer."""
        code = self._codes.get(method)
        if code is None:
            code = self._codes[method] = self._calls.encode(self.name, method)
        return self._calls.enter(code)

    def make_fault(self, method: str, problem: str, cause: BaseException | None = None) -> StrategyError:
        """Report and log a fault, and return it as an error to raise.

        Another fault of the same method is logged after LOG_INTERVAL at the earliest.
        """
        fault, now = StrategyError(self.name, method, problem), time.monotonic()
        if now >= self._log_again_at.get(method, 0.0):
            self._log_again_at[method] = now + LOG_INTERVAL
            log.error("%s", fault, exc_info=cause)
        self._on_fault(fault)
        return fault

    def _call_quietly(
        self, method: str, default: T, *args: Any, convert: Callable[[Any], T] | None = None, **kwargs: Any
    ) -> T:
        """Return a call's result, converted by `convert`; without it, it must have the type of `default`.

        After a fault, return `default`.
        """
        if self.is_suspended:
            return default
        try:
            found = self.call(method, *args, **kwargs)
            if convert is not None:
                return self._run(method, convert, found)
            if not isinstance(found, type(default)):
                raise self.make_fault(method, f"it returned {describe(found)}, not a {type(default).__name__}")
        except StrategyError:
            return default
        return found

    def _call_for(self, kind: type[T], method: str, *args: Any, **kwargs: Any) -> T:
        """Return a call's result. Raises StrategyError unless it has exactly the type `kind`."""
        found = self.call(method, *args, **kwargs)
        if type(found) is not kind:
            raise self.make_fault(method, f"it returned {describe(found)}, not a {kind.__name__}")
        return found

    # ---------------------------------------------------------------- seats
    def _check_length(self, method: str, seat: Seat) -> None:
        """Raise StrategyError unless a seat's length is as it was after the last call, or lower.

        It may be lower if another seat that computed shared tokens was closed.
        """
        known, length = self._lengths[id(seat)], getattr(seat, "length", None)
        if type(length) is not int or not 0 <= length <= known:
            raise self.make_fault(method, f"a seat of {known} tokens has length {describe(length)}")
        self._lengths[id(seat)] = length

    def _check_new_seat(self, seat: Any, lengths: range) -> None:
        """Raise TypeError or ValueError unless a new seat is sound, and its length is in `lengths`."""
        if not isinstance(seat, Seat):
            raise TypeError(f"it returned {describe(seat)}, not a Seat")
        if id(seat) in self._lengths:
            raise ValueError("it returned a seat that is open already")
        if type(seat.length) is not int or seat.length not in lengths:
            wanted = f"which must be from {lengths[0]} to {lengths[-1]}"
            raise ValueError(f"a new seat has length {describe(seat.length)}, {wanted}")
        check_report(seat)

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> Seat | None:
        seat = self.call("open", tokens, salt=salt, max_cached=max_cached)
        if seat is None:
            self._check_refusal("open", "None", len(tokens))
            return None
        return self._add_seat("open", seat, range(count_reusable_tokens(tokens, max_cached) + 1))

    def fork(self, seat: Seat) -> Seat | None:
        child = self.call("fork", seat)
        return None if child is None else self._add_seat("fork", child, range(seat.length, seat.length + 1))

    def _add_seat(self, method: str, seat: Any, lengths: range) -> Seat:
        """Return a new seat after its check. Raises StrategyError, after closing it, if it is not sound."""
        try:
            self._run(method, self._check_new_seat, seat, lengths)
        except StrategyError:
            if id(seat) not in self._lengths:  # the seat of another sequence stays open
                self._call_quietly("close", None, seat)
            raise
        assert isinstance(seat, Seat)
        self._lengths[id(seat)] = seat.length
        return seat

    def close(self, seat: Seat) -> None:
        del self._lengths[id(seat)]
        self._call_quietly("close", None, seat)

    @property
    def num_open_seats(self) -> int:
        return len(self._lengths)

    def ready(self, seat: Seat) -> bool:
        ready = self._call_for(bool, "ready", seat)
        self._check_length("ready", seat)
        return ready

    def grow(self, seat: Seat, num_tokens: int) -> bool:
        grown = self._call_for(bool, "grow", seat, num_tokens)
        self._check_length("grow", seat)
        if not grown:
            self._check_refusal("grow", "False", seat.length + num_tokens)
        return grown

    def _check_refusal(self, method: str, result: str, num_tokens: int) -> None:
        """Raise StrategyError if a call reports a lack of memory while the whole sequence would fit once more.

        Otherwise other requests would be preempted for nothing. A strategy with memory of its own is not checked.
        """
        if len(self._lengths) >= self.setup.geometry.max_seats:
            return  # it may have no further seat
        arena, pages = self.setup.arena, -(-self.bytes_for(num_tokens) // self.setup.arena.page_bytes)
        if pages and not self.draining and arena.has_room_for_sequence(self.name, pages):
            raise self.make_fault(method, f"it returned {result} although there is memory for {num_tokens} tokens")

    def crop(self, seat: Seat, length: int) -> None:
        self.call("crop", seat, length)
        self._check_length("crop", seat)
        if seat.length > length:
            raise self.make_fault("crop", f"a seat has {seat.length} tokens after crop to {length}")

    def retain(self, seat: Seat, *, priority: int, ttl: float | None) -> None:
        self._call_quietly("retain", None, seat, priority=priority, ttl=ttl)

    def discard(self, seat: Seat) -> None:
        self._call_quietly("discard", None, seat)

    # ---------------------------------------------------------------- memory
    def bytes_for(self, num_tokens: int) -> int:
        size = self._call_for(int, "bytes_for", num_tokens)
        if not 0 <= size < MAX_NUMBER:
            raise self.make_fault("bytes_for", f"{num_tokens} tokens take {describe(size)} bytes")
        return size

    def match(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> int:
        found = self._call_quietly("match", 0, tokens, salt=salt, max_cached=max_cached)
        return max(0, min(found, count_reusable_tokens(tokens, max_cached)))

    def idle_pages(self) -> int:
        if self._keeps_idle_pages:
            return 0
        return max(0, min(self._call_quietly("idle_pages", 0), self.setup.arena.num_held_pages(self.name)))

    def reclaim(self, pages: int) -> int:
        """Free idle pages; the number freed is counted by the arena, not taken from the strategy.

        If it is less than idle_pages() promised, no page counts as idle any more: other strategies, which cannot get
        these pages, would be at fault for refusing sequences although there is memory.
        """
        before, promised = self.setup.arena.num_held_pages(self.name), min(pages, self.idle_pages())
        self._call_quietly("reclaim", 0, pages)
        num_freed = max(0, before - self.setup.arena.num_held_pages(self.name))
        if num_freed < promised:
            self._keeps_idle_pages = True
            self.make_fault("reclaim", f"it freed {num_freed} of {promised} idle pages")
        return num_freed

    def pinned_pages(self) -> Collection[int]:
        nothing: Collection[int] = ()
        return self._call_quietly("pinned_pages", nothing, convert=partial(to_pages, num_pages=self.setup.arena.pages))

    # ---------------------------------------------------------------- a step
    def poll(self) -> None:
        self._call_quietly("poll", None)

    def plan(self, rows: Sequence[Row]) -> Plan:
        for row in rows:
            self._check_length("plan", row.seat)
        plan = self.call("plan", list(rows))
        return self._run("plan", self._guard_plan, plan, rows)

    def _guard_plan(self, plan: object, rows: Sequence[Row]) -> GuardedPlan:
        """Return a plan with its addresses. Raises TypeError or ValueError if they are wrong."""
        if not isinstance(plan, Plan):
            raise TypeError(f"it returned {describe(plan)}, not a Plan")
        check_rows(plan, rows)
        num_tokens = sum(row.num_tokens for row in rows)
        locations = [plan.kv_location(layer) for layer in range(len(self.setup.geometry.layers))]
        for layer, location in {id(where): (i, where) for i, where in enumerate(locations)}.values():
            if location is not None:
                check_location(location)
                self.setup.ops.check_slots(location.store, layer, location.at, num_tokens)
        if plan.query_tap is not None:
            check_tap(plan.query_tap, num_tokens, self.setup.geometry)
        return GuardedPlan(plan, rows, locations)

    def attend(self, plan: Plan, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if plan.kv_location(layer_idx) is not None:
            return super().attend(plan, layer_idx, q, k, v, out)
        assert isinstance(plan, GuardedPlan)
        dtype, mark = UNWRITTEN[out.itemsize]
        bits = out.view(dtype)
        bits.fill_(mark)
        self._run("attend", plan.inner.attend, layer_idx, q, k, v, out)
        if bool((bits == mark).any()):
            raise self.make_fault("attend", f"parts of `out` were not written in layer {layer_idx}")
        return None

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        assert isinstance(plan, GuardedPlan)
        lengths = [row.seat.length + len(ids) for row, ids in zip(plan.rows, tokens, strict=True)]
        self.call("commit", plan.inner, tokens)
        self._run("commit", self._check_committed_seats, plan.rows, lengths)

    def _check_committed_seats(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Raise ValueError unless the seats of committed rows have these lengths, and can be reported."""
        for row, length in zip(rows, lengths, strict=True):
            seat = row.seat
            if type(seat.length) is not int or seat.length != length:
                raise ValueError(f"a seat has length {describe(seat.length)} instead of {length}")
            check_report(seat)
            self._lengths[id(seat)] = length

    # ---------------------------------------------------------------- reports
    def usage(self) -> CacheUsage:
        nothing = CacheUsage(self.num_open_seats, 0, 0, 0, 0, 0, self.limit_bytes)
        return self._call_quietly("usage", nothing, convert=to_usage)

    def blocks(self) -> Blocks:
        return self._call_quietly("blocks", Blocks(), convert=to_blocks)

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        return self.inner.visible_positions(length, spec)

    def collect_block_events(self) -> BlockEvents | None:
        return self._call_quietly("collect_block_events", None, convert=to_events)

    def check_integrity(self) -> None:
        """Check the guarded cache's bookkeeping; an AssertionError stays one, as it shows a bug."""
        if not self.is_suspended:
            self.inner.check_integrity()
