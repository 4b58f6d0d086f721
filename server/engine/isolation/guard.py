"""A cache whose every call is checked: what a strategy raises or returns wrongly becomes a StrategyError that names it.

The scheduler and the engine use strategies through guards only. A call that decides about a request raises; a call
whose failure concerns no single request (such as usage()) reports the fault and returns a harmless default. Knows
neither requests nor what follows from a fault (quarantine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.errors import StrategyError
from cache_strategies.features import PageDescribing, PageMarking, PrefixListing
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    Blocks,
    CachedPrefix,
    CacheUsage,
    Geometry,
    PageInfo,
    PageState,
    Salt,
    SeatShape,
    count_reusable_tokens,
)
from kernels.types import LayerSpec
from server.engine.isolation import results
from server.engine.isolation.calls import CallObserver
from server.engine.isolation.checked_calls import CheckedCalls
from server.engine.isolation.results import GuardedPlan
from server.records import KVTokens

T = TypeVar("T")

# Methods that are not called unless a strategy overrides them
SKIPPED = ("poll", "ready", "row_limit", "compact", "collect_block_events")


class GuardedCache(CheckedCalls, KVCache[Seat]):
    """Implements KVCache by the calls of another cache, whose results are checked."""

    def __init__(
        self, inner: KVCache, on_fault: Callable[[StrategyError], None], calls: CallObserver | None = None
    ) -> None:
        """Guard `inner`, also as an owner of the arena's pages. `on_fault` is called with each fault, once."""
        super().__init__(inner.name, on_fault, calls)
        # By id, as a strategy's class of seat may have no hash, or one that changes
        self._seats: dict[int, Seat] = {}  # the open seats
        self._lengths: dict[int, int] = {}  # of the open seats, as last checked
        self._unreported: set[int] = set()  # open seats without a committed row: `cached` and `miss` are read after it
        self._keeps_idle_pages = False  # whether it freed fewer idle pages than it said it could
        self.is_suspended = False
        self.setup = inner.setup
        self.replace(inner)

    def replace(self, inner: KVCache) -> None:
        """Guard another cache of the same setup from now on. No seat may be open."""
        assert not self._seats
        self.inner, self.is_suspended, self._keeps_idle_pages = inner, False, False
        self.options, self.stores, self.contract = inner.options, inner.stores, inner.contract
        self._is_plugin = hasattr(inner, "interface_version")  # then its plans are checked before they are used
        self._overridden = {
            m for m in SKIPPED if getattr(getattr(inner, m), "__func__", None) is not getattr(KVCache, m)
        }
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
        assert not self._seats
        self.is_suspended = True
        self.setup.arena.release_all(self.name)

    @classmethod
    def seat_shape(cls, options: Any, geometry: Geometry) -> SeatShape:
        raise NotImplementedError("a guard is made when the sizes are known")

    # ---------------------------------------------------------------- calls and faults
    def call(self, method: str, *args: Any, convert: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
        """Return a call's result, converted by `convert`. Raises StrategyError for any exception of either."""
        if self.is_suspended:
            raise StrategyError(self.name, method, "the instance is in quarantine")
        found = self._run(method, getattr(self.inner, method), *args, **kwargs)
        return found if convert is None else self._run(method, convert, found)

    def call_quietly(
        self, method: str, default: T, *args: Any, convert: Callable[[Any], T] | None = None, **kwargs: Any
    ) -> T:
        """Return a call's result, converted by `convert`; without it, it must have the type of `default`.

        After a fault, return `default`.
        """
        try:
            found = self.call(method, *args, **kwargs)
            if found is None and default is None:
                return default
            if convert is not None:
                return self._run(method, convert, found)
            if not isinstance(found, type(default)):
                raise self.make_fault(method, f"it returned {results.describe(found)}, not a {type(default).__name__}")
        except StrategyError:
            return default
        return found

    # ---------------------------------------------------------------- seats
    def _call_with_seat(self, function: Callable[..., T], seat: Seat, *args: Any) -> T:
        """Call a method with a seat. Raises ValueError if the seat is longer after it than after the last such call.

        It may be shorter if another seat that computed shared tokens was closed.
        """
        found = function(seat, *args)
        known, length = self._lengths[id(seat)], seat.length
        if type(length) is not int or not 0 <= length <= known:
            raise ValueError(f"a seat of {known} tokens has length {results.describe(length)}")
        self._lengths[id(seat)] = length
        return found

    def _check_new_seat(self, seat: Any, lengths: range) -> None:
        """Raise TypeError or ValueError unless a new seat is sound, and its length is in `lengths`."""
        if id(seat) in self._seats:
            raise ValueError("it returned a seat that is open already")
        results.check_seat(seat, lengths)

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
            if id(seat) not in self._seats:  # the seat of another sequence stays open
                self.call_quietly("close", None, seat)
            raise
        assert isinstance(seat, Seat)
        self._seats[id(seat)], self._lengths[id(seat)] = seat, seat.length
        self._unreported.add(id(seat))
        return seat

    def close(self, seat: Seat) -> None:
        del self._seats[id(seat)], self._lengths[id(seat)]
        self._unreported.discard(id(seat))
        self.call_quietly("close", None, seat)

    @property
    def num_open_seats(self) -> int:
        return len(self._seats)

    def ready(self, seat: Seat) -> bool:
        if "ready" not in self._overridden:
            return True
        return self._check_type("ready", bool, self._run("ready", self._call_with_seat, self.inner.ready, seat))

    def row_limit(self, seat: Seat) -> int | None:
        if "row_limit" not in self._overridden:
            return self.contract.max_row
        limit = self._run("row_limit", self._call_with_seat, self.inner.row_limit, seat)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise self.make_fault("row_limit", f"it returned {results.describe(limit)}, not a number of tokens")
        return limit

    def grow(self, seat: Seat, num_tokens: int) -> bool:
        result = self._run("grow", self._call_with_seat, self.inner.grow, seat, num_tokens)
        if not (grown := self._check_type("grow", bool, result)):
            self._check_refusal("grow", "False", seat.length + num_tokens)
        return grown

    def _check_refusal(self, method: str, result: str, num_tokens: int) -> None:
        """Raise StrategyError if a call reports a lack of memory while the whole sequence would fit once more.

        Otherwise other requests would be preempted for nothing. A strategy with memory of its own is not checked.
        """
        if len(self._seats) >= self.setup.geometry.max_seats:
            return  # it may have no further seat
        arena, pages = self.setup.arena, -(-self.bytes_for(num_tokens) // self.setup.arena.page_bytes)
        if pages and not self.draining and arena.has_room_for_sequence(self.name, pages):
            raise self.make_fault(method, f"it returned {result} although there is memory for {num_tokens} tokens")

    def crop(self, seat: Seat, length: int) -> None:
        self._run("crop", self._call_with_seat, self.inner.crop, seat, length)
        if seat.length > length:
            raise self.make_fault("crop", f"a seat has {seat.length} tokens after crop to {length}")

    def retain(self, seat: Seat, *, priority: int, ttl: float | None) -> None:
        self.call_quietly("retain", None, seat, priority=priority, ttl=ttl)

    def discard(self, seat: Seat) -> None:
        self.call_quietly("discard", None, seat)

    # ---------------------------------------------------------------- memory
    def bytes_for(self, num_tokens: int) -> int:
        size = self._check_type("bytes_for", int, self.call("bytes_for", num_tokens))
        if not 0 <= size < results.MAX_NUMBER:
            raise self.make_fault("bytes_for", f"{num_tokens} tokens take {results.describe(size)} bytes")
        return size

    def estimate_bytes(self, num_tokens: int) -> int | None:
        """Return bytes_for() for a report: None after a fault, which is no reason for a quarantine."""
        if not self.is_suspended:
            with suppress(StrategyError):
                return self._run("estimate_bytes", lambda: results.to_bytes(self.inner.bytes_for(num_tokens)))
        return None

    def idle_pages(self) -> int:
        if self._keeps_idle_pages:
            return 0
        return max(0, min(self.call_quietly("idle_pages", 0), self.setup.arena.num_held_pages(self.name)))

    def reclaim(self, pages: int) -> int:
        """Free idle pages; the number freed is counted by the arena, not taken from the strategy.

        If it is less than idle_pages() promised, no page counts as idle any more: other strategies, which cannot get
        these pages, would be at fault for refusing sequences although there is memory.
        """
        before, promised = self.setup.arena.num_held_pages(self.name), min(pages, self.idle_pages())
        self.call_quietly("reclaim", 0, pages)
        num_freed = max(0, before - self.setup.arena.num_held_pages(self.name))
        if num_freed < promised:
            self._keeps_idle_pages = True
            self.make_fault("reclaim", f"it freed {num_freed} of {promised} idle pages")
        return num_freed

    def pinned_pages(self) -> Collection[int]:
        convert = partial(results.to_pages, num_pages=self.setup.arena.pages)
        return self.call_quietly("pinned_pages", set[int](), convert=convert)

    # ---------------------------------------------------------------- a step
    def poll(self) -> None:
        if "poll" in self._overridden:
            self.call_quietly("poll", None)

    def plan(self, rows: Sequence[Row]) -> Plan:
        plan = self._run("plan", self._plan, rows)
        if self._is_plugin:
            self.check_plan(plan)
        return plan

    def _plan(self, rows: Sequence[Row]) -> GuardedPlan:
        """Return the strategy's plan with its positions, and its addresses, which are not checked yet.

        Raises TypeError or ValueError if it is not a Plan, has other rows, or positions that the model does not have.
        """
        planned, plan = tuple(rows), self.inner.plan(list(rows))
        if not isinstance(plan, Plan):
            raise TypeError(f"it returned {results.describe(plan)}, not a Plan")
        if tuple(plan.rows) != planned:
            raise ValueError("the plan has other rows than were passed in")
        geometry = self.setup.geometry
        positions = results.to_positions(plan.list_positions(), planned, geometry.max_seq_len)
        return GuardedPlan(plan, planned, plan.list_kv_locations(len(geometry.layers)), positions)

    def check_plan(self, plan: Plan) -> None:
        """Raise StrategyError if a plan's addresses or its query tap are wrong."""
        assert isinstance(plan, GuardedPlan)
        self._run("plan", self._check_plan, plan)
        plan.is_checked = True

    def _check_plan(self, plan: GuardedPlan) -> None:
        """Raise TypeError or ValueError if a plan's addresses or tap are wrong."""
        layers = self.setup.geometry.layers
        locations = plan.list_kv_locations(len(layers))
        results.check_locations(locations)
        super().check_plan(plan)
        if self._is_plugin:
            results.check_pages(locations, [spec.window for spec in layers], self.setup.arena, self.name)
        if plan.query_tap is not None:
            results.check_tap(plan.query_tap, sum(row.num_tokens for row in plan.rows), self.setup.geometry)

    def attend(self, plan: Plan, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        assert isinstance(plan, GuardedPlan)
        if plan.kv_location(layer_idx) is not None:
            if not plan.is_checked:
                self.check_plan(plan)
            return super().attend(plan, layer_idx, q, k, v, out)
        self.check_new_tokens(plan, layer_idx, k, v)
        results.mark_unwritten(out)
        self._run("attend", plan.inner.attend, layer_idx, q, k, v, out)
        if results.has_unwritten(out):
            raise self.make_fault("attend", f"parts of `out` were not written in layer {layer_idx}")
        return None

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        assert isinstance(plan, GuardedPlan)
        self._run("commit", self._commit, plan, tokens)

    def _commit(self, plan: GuardedPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Commit a plan. Raises ValueError unless its seats have the right lengths then, and can be reported."""
        lengths = [self._lengths[id(seat)] + len(ids) for (seat, _), ids in zip(plan.rows, tokens, strict=True)]
        self.inner.commit(plan.inner, tokens)
        for (seat, _), length in zip(plan.rows, lengths, strict=True):
            if type(seat.length) is not int or seat.length != length:
                raise ValueError(f"a seat has length {results.describe(seat.length)} instead of {length}")
            self._lengths[id(seat)] = length
            if id(seat) in self._unreported:
                results.check_report(seat)
                self._unreported.remove(id(seat))

    @property
    def compacts(self) -> bool:
        return "compact" in self._overridden

    def compact(self, seat: Seat) -> int | None:
        return self._run("compact", self._compact, seat)

    def _compact(self, seat: Seat) -> int | None:
        """Compact a seat. Raises ValueError if its length has changed, or if it cannot have dropped so many tokens."""
        dropped = self.inner.compact(seat)
        if seat.length != self._lengths[id(seat)]:
            raise ValueError(f"a seat of {self._lengths[id(seat)]} tokens has length {results.describe(seat.length)}")
        return None if dropped is None else results.to_dropped_count(dropped, seat, exact=self.contract.exact)

    # ---------------------------------------------------------------- reports
    def usage(self) -> CacheUsage:
        nothing = CacheUsage(self.num_open_seats, 0, 0, 0, 0, 0, self.limit_bytes)
        return self.call_quietly("usage", nothing, convert=results.to_usage)

    def blocks(self) -> Blocks:
        return self.call_quietly("blocks", Blocks(), convert=results.to_blocks)

    def count_dropped_tokens(self, seat: Seat) -> int:
        return self.count_tokens([seat]).dropped

    def count_tokens(self, seats: Iterable[Seat] | None = None) -> KVTokens:
        """Return the committed tokens of open seats, by default of all; after a fault, as if none was dropped."""
        seats = list(self._seats.values() if seats is None else seats)
        dropped = []
        for seat in seats:
            convert = partial(results.to_dropped_count, seat=seat, exact=self.contract.exact)
            dropped.append(self.call_quietly("count_dropped_tokens", -1, seat, convert=convert))
            if dropped[-1] < 0:
                dropped = []  # the other seats would have the same fault, which counts once
                break
        return KVTokens(sum(self._lengths[id(seat)] for seat in seats) - sum(dropped), sum(dropped))

    def token_budget(self, length: int) -> int | None:
        convert = partial(results.to_budget, length=length, exact=self.contract.exact)
        return self.call_quietly("token_budget", None, length, convert=convert)

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        return self.inner.visible_positions(length, spec)

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        """Return up to `limit` nodes of the tree of cached prefixes, and the number of others; after a fault, none."""
        if not isinstance(self.inner, PrefixListing):
            return (), 0
        nothing: tuple[Sequence[CachedPrefix], int] = ((), 0)
        return self.call_quietly("list_prefixes", nothing, limit, convert=partial(results.to_prefixes, limit=limit))

    def read_page_states(self, num_pages: int) -> Tensor:
        """Return the `PageState` of each page, uint8 [num_pages]: IN_USE if the strategy marks none, or after a fault.

        What is returned for the pages of other owners means nothing.
        """
        in_use = torch.full((num_pages,), int(PageState.IN_USE), dtype=torch.uint8)
        if not isinstance(self.inner, PageMarking):
            return in_use
        marks = in_use.clone()
        return self.call_quietly("mark_pages", in_use, marks, convert=lambda _: results.to_page_states(marks, in_use))

    def describe_page(self, page: int) -> PageInfo | None:
        """Return what the strategy knows about one of its pages, if anything."""
        if not isinstance(self.inner, PageDescribing):
            return None
        return self.call_quietly("describe_page", None, page, convert=results.to_page_info)

    def collect_block_events(self) -> BlockEvents | None:
        if "collect_block_events" not in self._overridden:
            return None
        return self.call_quietly("collect_block_events", None, convert=results.to_events)

    def check_integrity(self) -> None:
        """Check the guarded cache's bookkeeping; an AssertionError stays one, as it shows a bug."""
        if not self.is_suspended:
            self.inner.check_integrity()
