"""A cache whose every call is checked: what a strategy raises or returns wrongly becomes a StrategyError that names it.

The scheduler and the engine use strategies through guards only. A call that decides about a request raises; a call
whose failure concerns no single request (such as usage()) reports the fault and returns a harmless default. Knows
neither requests nor what follows from a fault (quarantine.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    Blocks,
    CacheUsage,
    Geometry,
    Miss,
    PinError,
    Salt,
    SeatShape,
    count_reusable_tokens,
)
from kernels.ops import KVLocation
from kernels.types import LayerSpec
from server.engine.isolation.errors import StrategyError
from server.records import KVTokens

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL = 60.0  # seconds between two log messages about quiet faults of the same method
MISSES = {*get_args(Miss), None}
# What `out` of a hook is filled with before the call: a NaN that no computation gives, by the size of its numbers
UNWRITTEN = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF80000DEADBEEF)}


class CallObserver(Protocol):
    """Is told of each call of a strategy's method, so that one that never returns can be named."""

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        """Return a code for each method of an instance."""
        ...

    def enter(self, code: int) -> int:
        """Record that the call of a method begins; return what to pass to leave()."""
        ...

    def leave(self, outer: int) -> None:
        """Record that the call has ended."""
        ...


class _NoObserver:
    """Implements CallObserver by doing nothing."""

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        return {}

    def enter(self, code: int) -> int:
        return 0

    def leave(self, outer: int) -> None:
        pass


class GuardedPlan(Plan):
    """A strategy's plan after its checks, with the addresses that it gave for each layer."""

    def __init__(self, inner: Plan, rows: Sequence[Row], locations: Sequence[KVLocation | None]) -> None:
        self.inner = inner
        self.rows = rows
        self.query_tap = inner.query_tap
        self.is_checked = False  # whether the addresses were checked, for kernels that compute layer by layer
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
        self._calls = calls or _NoObserver()
        self._log_again_at: dict[str, float] = {}  # by method: when a quiet fault of it is logged again
        self._lengths: dict[Seat, int] = {}  # of the open seats, as last checked
        self.is_suspended = False
        self.setup = inner.setup
        self._codes = self._calls.encode_methods(self.name)
        self.replace(inner)

    def replace(self, inner: KVCache) -> None:
        """Guard another cache of the same setup from now on. No seat may be open."""
        assert not self._lengths
        self.inner, self.is_suspended = inner, False
        self.options, self.stores, self.contract = inner.options, inner.stores, inner.contract
        # Calls of every step are left out if the strategy has no such method of its own
        self._has_poll = getattr(inner.poll, "__func__", None) is not KVCache.poll
        self._has_events = getattr(inner.collect_block_events, "__func__", None) is not KVCache.collect_block_events
        self.setup.arena.register_owner(self.name, self)

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
        """Run a strategy's code as a call of `method`. Raises StrategyError for any exception of it."""
        outer = self._calls.enter(self._codes.get(method, 0))
        try:
            return function(*args, **kwargs)
        except PinError:
            raise  # the answer to an operator
        except Exception as error:
            raise self.make_fault(method, f"{type(error).__name__}: {error}") from error
        finally:
            self._calls.leave(outer)

    def make_fault(self, method: str, problem: str) -> StrategyError:
        """Report a fault, and return it as an error to raise."""
        fault = StrategyError(self.name, method, problem)
        self._on_fault(fault)
        return fault

    def _call_quietly(self, method: str, default: T, *args: Any, **kwargs: Any) -> T:
        """Return a call's result, which must have the type of `default`; after a fault, `default`."""
        if self.is_suspended:
            return default
        try:
            found = self._run(method, getattr(self.inner, method), *args, **kwargs)
            if not isinstance(found, type(default)):
                raise self.make_fault(method, f"it returned {found!r}, not a {type(default).__name__}")
        except StrategyError as error:
            self._log_quiet_fault(error)
            return default
        return found

    def _log_quiet_fault(self, error: StrategyError) -> None:
        """Log a fault that concerns no single request; the same method again after LOG_INTERVAL at the earliest."""
        now = time.monotonic()
        if now >= self._log_again_at.get(error.method, 0.0):
            self._log_again_at[error.method] = now + LOG_INTERVAL
            log.error("%s; the server goes on without its result", error, exc_info=error.__cause__)

    def _check_type(self, method: str, kind: type[T], found: Any) -> T:
        """Return what a call returned. Raises StrategyError unless it has exactly the type `kind`."""
        if type(found) is not kind:
            raise self.make_fault(method, f"it returned {found!r}, not a {kind.__name__}")
        return found

    # ---------------------------------------------------------------- seats
    def _check_length(self, method: str, seat: Seat) -> None:
        """Raise StrategyError unless a seat's length is as it was after the last call, or lower.

        It may be lower if another seat that computed shared tokens was closed.
        """
        known = self._lengths[seat]
        if type(seat.length) is not int or not 0 <= seat.length <= known:
            raise self.make_fault(method, f"a seat of {known} tokens has length {seat.length!r}")
        self._lengths[seat] = seat.length

    def _check_new_seat(self, method: str, seat: Any, lengths: range) -> None:
        """Raise StrategyError unless a new seat is sound, and its length is in `lengths`."""
        problem = None
        if not isinstance(seat, Seat):
            problem = f"it returned {seat!r}, not a Seat"
        elif seat in self._lengths:
            problem = "it returned a seat that is open already"
        elif type(seat.length) is not int or seat.length not in lengths:
            problem = f"a new seat has length {seat.length!r}, which must be from {lengths[0]} to {lengths[-1]}"
        elif type(seat.cached) is not int or not 0 <= seat.cached <= seat.length:
            problem = f"a new seat of {seat.length} tokens has {seat.cached!r} cached ones"
        elif seat.miss not in MISSES:
            problem = f"a new seat has the unknown miss {seat.miss!r}"
        if problem is not None:
            raise self.make_fault(method, problem)

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
            self._check_new_seat(method, seat, lengths)
        except StrategyError:
            if seat not in self._lengths:  # the seat of another sequence stays open
                self._call_quietly("close", None, seat)
            raise
        assert isinstance(seat, Seat)
        self._lengths[seat] = seat.length
        return seat

    def close(self, seat: Seat) -> None:
        del self._lengths[seat]
        self._call_quietly("close", None, seat)

    @property
    def num_open_seats(self) -> int:
        return len(self._lengths)

    def ready(self, seat: Seat) -> bool:
        ready = self._check_type("ready", bool, self._run("ready", self.inner.ready, seat))
        self._check_length("ready", seat)
        return ready

    def grow(self, seat: Seat, num_tokens: int) -> bool:
        grown = self._check_type("grow", bool, self._run("grow", self.inner.grow, seat, num_tokens))
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
        size = self._check_type("bytes_for", int, self.call("bytes_for", num_tokens))
        if size < 0:
            raise self.make_fault("bytes_for", f"{num_tokens} tokens take {size} bytes")
        return size

    def idle_pages(self) -> int:
        return max(0, self._call_quietly("idle_pages", 0))

    def reclaim(self, pages: int) -> int:
        """Free idle pages; the number freed is counted by the arena, not taken from the strategy."""
        before = self.setup.arena.num_held_pages(self.name)
        self._call_quietly("reclaim", 0, pages)
        return max(0, before - self.setup.arena.num_held_pages(self.name))

    def pinned_pages(self) -> Collection[int]:
        pinned: Any = self._call_quietly("pinned_pages", object())
        try:
            return {page for page in pinned if 0 <= page < self.setup.arena.pages}
        except TypeError:
            return ()

    # ---------------------------------------------------------------- a step
    def poll(self) -> None:
        if self._has_poll:
            self._call_quietly("poll", None)

    def plan(self, rows: Sequence[Row]) -> Plan:
        for seat, _ in rows:
            self._check_length("plan", seat)
        planned = tuple(rows)
        plan = self._run("plan", self.inner.plan, rows)
        if not isinstance(plan, Plan):
            raise self.make_fault("plan", f"it returned {plan!r}, not a Plan")
        return GuardedPlan(plan, planned, self._run("plan", self._find_locations, plan, planned))

    def _find_locations(self, plan: Plan, rows: tuple[Row, ...]) -> list[KVLocation | None]:
        """Return where a plan stores each layer. Raises ValueError if it is a plan for other rows."""
        if tuple(plan.rows) != rows:
            raise ValueError("the plan has other rows than were passed in")
        return [plan.kv_location(layer) for layer in range(len(self.setup.geometry.layers))]

    def check_plan(self, plan: Plan) -> None:
        assert isinstance(plan, GuardedPlan)
        self._run("plan", super().check_plan, plan)
        plan.is_checked = True

    def attend(self, plan: Plan, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        assert isinstance(plan, GuardedPlan)
        if plan.kv_location(layer_idx) is not None:
            if not plan.is_checked:
                self.check_plan(plan)
            return super().attend(plan, layer_idx, q, k, v, out)
        dtype, mark = UNWRITTEN[out.itemsize]
        bits = out.view(dtype)
        bits.fill_(mark)
        self._run("attend", plan.inner.attend, layer_idx, q, k, v, out)
        if bool((bits == mark).any()):
            raise self.make_fault("attend", f"parts of `out` were not written in layer {layer_idx}")
        return None

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        assert isinstance(plan, GuardedPlan)
        lengths = [seat.length + len(ids) for (seat, _), ids in zip(plan.rows, tokens, strict=True)]
        self._run("commit", self.inner.commit, plan.inner, tokens)
        for (seat, _), length in zip(plan.rows, lengths, strict=True):
            if seat.length != length:
                raise self.make_fault("commit", f"a seat has length {seat.length!r} instead of {length}")
            self._lengths[seat] = length

    # ---------------------------------------------------------------- reports
    def usage(self) -> CacheUsage:
        nothing = CacheUsage(self.num_open_seats, 0, 0, 0, 0, 0, self.limit_bytes)
        return self._call_quietly("usage", nothing)

    def blocks(self) -> Blocks:
        return self._call_quietly("blocks", Blocks())

    def count_dropped_tokens(self, seat: Seat) -> int:
        return self.count_tokens([seat]).dropped

    def count_tokens(self, seats: Iterable[Seat] | None = None) -> KVTokens:
        """Return the committed tokens of open seats, by default of all; after a fault, as if none was dropped."""
        seats = list(self._lengths if seats is None else seats)
        dropped = 0
        try:
            if not self.is_suspended:
                dropped = sum(self._count_dropped_tokens(seat) for seat in seats)
        except StrategyError as error:  # of the first seat: the others would have the same fault
            self._log_quiet_fault(error)
        return KVTokens(sum(self._lengths[seat] for seat in seats) - dropped, dropped)

    def _count_dropped_tokens(self, seat: Seat) -> int:
        """Return the checked number of a seat's dropped tokens. Raises StrategyError if it cannot be right."""
        dropped = self._check_type("count_dropped_tokens", int, self.call("count_dropped_tokens", seat))
        self._check_length("count_dropped_tokens", seat)
        most = 0 if self.contract.exact else seat.length
        if not 0 <= dropped <= most:
            problem = f"a seat of {seat.length} tokens has {dropped} dropped ones, which must be from 0 to {most}"
            raise self.make_fault("count_dropped_tokens", problem)
        return dropped

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        return self.inner.visible_positions(length, spec)

    def collect_block_events(self) -> BlockEvents | None:
        events = self._call_quietly("collect_block_events", object()) if self._has_events else None
        return events if isinstance(events, BlockEvents) else None

    def check_integrity(self) -> None:
        """Check the guarded cache's bookkeeping; an AssertionError stays one, as it shows a bug."""
        if not self.is_suspended:
            self.inner.check_integrity()
