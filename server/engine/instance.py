"""A strategy instance as the engine uses it: its strategy, what the engine knows of it, and its guard.

The engine calls a strategy within regions only: one for scheduling a row, planning a step, committing it, a report. A
region costs no check of what single calls return. Whatever is raised in it becomes a `StrategyError`, which names the
instance and the method; it ends requests of this instance and no others. What could harm others is checked: new
sequences, numbers that the engine computes with, memory that plug-ins name. All else that a strategy may do wrongly
harms its own requests, and is found by the kit (plugin_kit). Knows neither requests nor what follows from a fault
(isolation/quarantine.py).
"""

from __future__ import annotations

import json
import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from traceback import walk_tb
from types import TracebackType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec
import torch
from torch import Tensor

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.errors import StrategyError
from cache_strategies.features import BlockDescribing, BlockMarking, PrefixListing
from cache_strategies.memory import Memory
from cache_strategies.memory import Region as MemoryRegion
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    BlockInfo,
    Blocks,
    BlockState,
    CachedPrefix,
    CacheUsage,
    Contract,
    Miss,
    PinError,
    Salt,
    count_reusable_tokens,
)
from kernels.ops import KVLocation
from server.engine.calls import NUM_CODES, CallObserver, NoObserver
from server.engine.isolation.checks import check_locations, check_owner, check_tap, describe, describe_error
from server.records import Compaction, KVTokens

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL = 60.0  # seconds between two log messages about faults of the same method
MAX_REPORT_BYTES = 1 << 26  # of a report in JSON
MISSES = {*get_args(Miss), None}
# Regions in which nothing that a request needs is computed: a fault there is counted, and ends nothing
REPORTS = frozenset(
    (
        *("usage", "blocks", "count_dropped_tokens", "estimate_bytes", "token_budget", "collect_block_events"),
        *("mark_blocks", "describe_block", "list_prefixes"),
    )
)
# The methods that are called in the region "schedule", by the functions that call them or are them
SCHEDULING = {name: name for name in ("ready", "row_limit", "grow")} | {
    "update_length": "ready",
    "limit_row": "row_limit",
}
PINNING = frozenset({"pin", "pin_prefix"})
OUTSIDE = -1


class Region:
    """A part of the engine's work on an instance. What is raised in it becomes a StrategyError of the instance."""

    __slots__ = ("_code", "_make_fault", "_name", "_numbers", "_outer", "_running")

    def __init__(self, name: str, code: int, instance: Instance, observer: CallObserver, numbers: count[int]) -> None:
        self._name, self._code, self._numbers = name, code, numbers
        self._running = observer.running
        self._make_fault = instance.make_fault
        self._outer = OUTSIDE

    def __enter__(self) -> None:
        assert self._outer == OUTSIDE, "a region is entered once at a time"
        running = self._running
        self._outer, running[0] = running[0], next(self._numbers) + self._code

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._running[0], self._outer = self._outer, OUTSIDE
        if error is not None and not self._is_answer(error):
            method, is_report = find_method(error, self._name), self._name in REPORTS
            raise self._make_fault(method, describe_error(error), error, is_report=is_report) from error

    def _is_answer(self, error: BaseException) -> bool:
        """Return whether an error is no fault, or one that was reported already."""
        match error:
            case StrategyError():
                return error.is_counted
            case PinError():  # the answer to an operator
                return self._name in PINNING
        return isinstance(error, KeyboardInterrupt)  # of the user of an engine without a server


class Regions(dict[str, Region]):
    """The regions of an instance by name, each made when it is first used."""

    def __init__(self, instance: Instance, observer: CallObserver) -> None:
        super().__init__()
        self._instance, self._observer = instance, observer
        self._codes = observer.encode_methods(instance.name)
        self._numbers = count(NUM_CODES, NUM_CODES)

    def __missing__(self, name: str) -> Region:
        self[name] = region = Region(name, self._codes.get(name, 0), self._instance, self._observer, self._numbers)
        return region


def find_method(error: BaseException, region: str) -> str:
    """Return the name of the method from which an error came, as far as the traceback tells; else that of its region.

    All regions but one are the call of one method, of which they have the name.
    """
    if region != "schedule":
        return region
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    return next((SCHEDULING[name] for name in reversed(names) if name in SCHEDULING), region)


class PlannedRows(NamedTuple):
    """What a strategy's plan says of a step's rows."""

    plan: Plan
    locations: Sequence[KVLocation | None]  # by layer
    positions: Sequence[int]  # of each row's first token


class Instance:
    """A strategy instance of an engine."""

    def __init__(
        self, strategy: KVCache, on_fault: Callable[[StrategyError], None], observer: CallObserver | None = None
    ) -> None:
        """Use a strategy; `on_fault` is called with each fault, once; `observer` sees which region is running."""
        self.name = strategy.name
        self.memory: Memory = strategy.setup.memory.shared
        self._on_fault = on_fault
        self._log_again_at: dict[str, float] = {}  # by method: when a fault of it is logged again
        self.region = Regions(self, observer or NoObserver())
        # By id, as a strategy's class of sequence may have no hash, or one that changes
        self._open: dict[int, Seat] = {}
        self.use(strategy)

    def use(self, strategy: KVCache) -> None:
        """Use another strategy of the same setup from now on. No sequence may be open."""
        assert not self._open
        self.strategy, self.is_suspended, self._keeps_idle_blocks = strategy, False, False
        self.setup, self.contract = strategy.setup, strategy.contract
        self._bytes_by_tokens: dict[int, int] = {}
        self._is_plugin = hasattr(strategy, "interface_version")  # then its plans are checked before they are used
        self.compacts = _overrides(strategy, "compact")
        self.limits_rows = _overrides(strategy, "row_limit") or strategy.contract.max_row is not None
        self._polls = _overrides(strategy, "poll")
        self._retains = _overrides(strategy, "retain")
        self._has_events = _overrides(strategy, "collect_block_events")
        self.memory.set_owner(self.name, self)

    def rebuild(self, make: Callable[[], KVCache]) -> None:
        """Use the strategy that `make` builds. Raises StrategyError if that fails. No sequence may be open."""
        try:
            with self.region["__init__"]:
                strategy = make()
                assert isinstance(strategy.contract, Contract)
        except StrategyError:
            self.memory.release_all(self.name)
            raise
        self.use(strategy)

    def suspend(self) -> None:
        """Free all memory of the strategy, and call it no more until `use`. No sequence may be open."""
        assert not self._open
        self.is_suspended = True
        self.memory.release_all(self.name)

    def make_fault(
        self, method: str, problem: str, cause: BaseException | None = None, *, is_report: bool = False
    ) -> StrategyError:
        """Report and log a fault, and return it as an error to raise.

        Another fault of the same method is logged after LOG_INTERVAL at the earliest.
        """
        fault, now = StrategyError(self.name, method, problem, is_report=is_report, is_counted=True), time.monotonic()
        if now >= self._log_again_at.get(method, 0.0):
            self._log_again_at[method] = now + LOG_INTERVAL
            log.error("%s", fault, exc_info=cause)
        self._on_fault(fault)
        return fault

    # ---------------------------------------------------------------- sequences
    def open(
        self,
        tokens: Sequence[int],
        *,
        salt: Salt = NO_SALT,
        max_cached: int | None = None,
        priority: int = 0,
        ttl: float | None = None,
    ) -> Seat | None:
        """Open a sequence, as `KVCache.open` and `retain` say. Raises StrategyError."""
        self._check_in_use("open")
        with self.region["open"]:
            seat = self.strategy.open(tokens, salt=salt, max_cached=max_cached)
            if seat is None:
                return None
            self._add(seat, count_reusable_tokens(tokens, max_cached))
        if self._retains:
            self._call_quietly("retain", seat, priority=priority, ttl=ttl)
        return seat

    def fork(self, seat: Seat, length: int) -> Seat | None:
        """Return a second sequence with the `length` tokens of a sequence; None if there is none now."""
        with self.region["fork"]:
            child = self.strategy.fork(seat)
            if child is not None:
                self._add(child, length, least=length)
        return child

    def _add(self, seat: Any, most: int, least: int = 0) -> None:
        """Add a new sequence. Raises TypeError or ValueError, after closing it, if it is not sound."""
        if id(seat) in self._open:
            raise ValueError("it returned a seat that is open already")
        try:
            if not isinstance(seat, Seat):
                raise TypeError(f"it returned {describe(seat)}, not a Seat")
            if check_int("the length of a new seat", seat.length, most) < least:
                raise ValueError(f"a new seat has length {seat.length} instead of {least}")
            _check_found(seat, seat.length)
            check_int("the room of a new seat", seat.room)
        except BaseException:
            self._call_quietly("close", seat)
            raise
        self._open[id(seat)] = seat

    def close(self, seat: Seat) -> None:
        del self._open[id(seat)]
        self._call_quietly("close", seat)

    def discard(self, seat: Seat) -> None:
        """Keep others from reusing NaN; called before close()."""
        self._call_quietly("discard", seat)

    def crop(self, seat: Seat, length: int) -> int:
        """Drop the tokens from `length` on; return how many are left, as a strategy may drop more."""
        with self.region["crop"]:
            self.strategy.crop(seat, length)
            return check_int("the length of a seat after crop()", seat.length, length)

    def read_length(self, seat: Seat, known: int) -> int:
        """Return the length of a sequence of which no row was committed; called in a region.

        It may fall, if another sequence was closed that computed shared tokens.
        """
        return check_int("the length of a seat", seat.length, known)

    def read_found(self, seat: Seat, length: int) -> tuple[int, str | None]:
        """Return how many of the `length` tokens of a sequence were found in the cache, and why not more."""
        with self.region["commit"]:
            _check_found(seat, length)
            return seat.cached, seat.miss

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_free_seat(self) -> bool:
        """Whether the strategy has to provide a further sequence, if there is memory."""
        return len(self._open) < self.setup.geometry.max_seats

    # ---------------------------------------------------------------- memory
    @property
    def limit_bytes(self) -> int:
        """The most memory, in bytes, that the instance could hold if all others shrank to their floors."""
        return self.memory.get_capacity(self.name)

    @property
    def at_limit(self) -> bool:
        """Whether the instance can hold more memory only after its own sequences have freed some."""
        return self.memory.is_at_limit(self.name)

    @property
    def draining(self) -> bool:
        """Whether the instance may exceed its lowered limit until its running requests end; no new ones start then."""
        return self.memory.is_draining(self.name)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the peak bytes of a sequence of `num_tokens` tokens. Raises StrategyError."""
        return self._count_bytes("sizes", num_tokens)

    def _count_bytes(self, region: str, num_tokens: int) -> int:
        self._check_in_use(region)
        if (known := self._bytes_by_tokens.get(num_tokens)) is not None:
            return known
        with self.region[region]:
            found = self.memory.count_sequence_bytes(self.name, num_tokens)
            size = check_int(f"the bytes of {num_tokens} tokens", found)
        self._bytes_by_tokens[num_tokens] = size
        return size

    def estimate_bytes(self, num_tokens: int) -> int | None:
        """Return bytes_for() for a report: None after a fault, which is no reason for a quarantine."""
        try:
            return self._count_bytes("estimate_bytes", num_tokens)
        except StrategyError:
            return None

    @property
    def idle_bytes(self) -> int:
        """The bytes that evict() could free, at most those that the instance holds."""
        if self._keeps_idle_blocks or self.is_suspended:
            return 0
        held = self.memory.get_held_bytes(self.name)
        try:
            with self.region["idle_bytes"]:
                return max(0, min(operator.index(self.strategy.idle_bytes), held))
        except StrategyError:
            return 0

    def evict(self, num_bytes: int) -> int:
        """Free idle blocks; the bytes freed are counted by the memory, not taken from the strategy.

        If they are fewer than idle_bytes promised, no block counts as idle any more: others could not get its memory.
        """
        before, promised = self.memory.get_held_bytes(self.name), min(num_bytes, self.idle_bytes)
        self._call_quietly("evict", num_bytes)
        freed = max(0, before - self.memory.get_held_bytes(self.name))
        if freed < promised:
            self._keeps_idle_blocks = True
            self.make_fault("evict", f"it freed {freed} of {promised} idle bytes")
        return freed

    def pinned_blocks(self) -> Mapping[MemoryRegion, Collection[int]]:
        """Return the pinned blocks by region, which cannot be evicted."""
        if self.is_suspended:
            return {}
        try:
            with self.region["pinned_blocks"]:
                own = self.memory.list_regions(self.name)
                pinned = self.strategy.pinned_blocks()
                return {region: {*map(operator.index, pinned[region])} for region in own if region in pinned}
        except StrategyError:
            return {}

    def count_pinned_bytes(self) -> int:
        return sum(len(blocks) * region.size for region, blocks in self.pinned_blocks().items())

    def count_unused_bytes(self) -> int:
        """Return how many bytes the instance holds for neither sequences nor reuse nor pins."""
        held = self.memory.get_held_bytes(self.name)
        return max(0, held - self.idle_bytes - self.count_pinned_bytes()) if held else 0

    # ---------------------------------------------------------------- a step
    def poll(self) -> None:
        if self._polls:
            self._call_quietly("poll")

    def plan(self, rows: Sequence[Row]) -> PlannedRows:
        """Return what the strategy's plan says of rows; the plans of plug-ins are checked. Raises StrategyError."""
        with self.region["plan"]:
            plan = self.strategy.plan(list(rows))
            planned = PlannedRows(plan, plan.list_kv_locations(len(self.setup.geometry.layers)), plan.list_positions())
            if self._is_plugin:
                self._check_plan(planned, rows)
            most = self.setup.geometry.max_seq_len
            for row, position in zip(rows, planned.positions, strict=True):
                if not 0 <= position <= most - row.num_tokens:
                    raise ValueError(f"a seat has the position {describe(position)}, and the model has {most}")
        return planned

    def check_plan(self, planned: PlannedRows, rows: Sequence[Row]) -> None:
        """Raise StrategyError if a plan's addresses or its query tap are wrong: called after a step has failed."""
        with self.region["plan"]:
            self._check_plan(planned, rows)

    def _check_plan(self, planned: PlannedRows, rows: Sequence[Row]) -> None:
        """Raise TypeError or ValueError if a plan's addresses or its tap are wrong."""
        geometry, num_tokens = self.setup.geometry, sum(row.num_tokens for row in rows)
        check_locations(planned.locations)
        self.setup.check_slots(planned.locations, num_tokens)
        if self._is_plugin:
            check_owner(planned.locations, self.memory, self.name)
        if planned.plan.query_tap is not None:
            check_tap(planned.plan.query_tap, num_tokens, geometry)

    def attend(self, plan: Plan, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Let a strategy compute a layer for a plan's rows, as `Plan.attend` says. Raises StrategyError."""
        with self.region["attend"]:
            plan.attend(layer_idx, q, k, v, out)

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        """Commit a plan, as `KVCache.commit` says. Raises StrategyError."""
        with self.region["commit"]:
            self.strategy.commit(plan, tokens)

    def compact(self, seat: Seat) -> Compaction | None:
        """Compact a sequence, and try it once more if that fails. Raises StrategyError if it fails again.

        Return the compaction (of both tries); None if nothing was compacted.
        """
        began = time.perf_counter()
        try:
            dropped = self._compact(seat)
        except StrategyError:
            dropped = self._compact(seat)
        return None if dropped is None else Compaction(time.perf_counter() - began, dropped)

    def _compact(self, seat: Seat) -> int | None:
        with self.region["compact"]:
            dropped = self.strategy.compact(seat)
            return None if dropped is None else check_int("the number of dropped tokens", dropped)

    # ---------------------------------------------------------------- reports
    def report(self, method: str, kind: Any, default: T, *args: Any) -> T:
        """Return what a method of the strategy reports, as plain values of a type; after a fault, the default."""
        if self.is_suspended:
            return default
        try:
            with self.region[method]:
                return to_plain(getattr(self.strategy, method)(*args), kind)  # type: ignore[no-any-return]
        except StrategyError:
            return default

    def usage(self) -> CacheUsage:
        nothing = CacheUsage(self.num_open, 0, 0, 0, 0, 0, self.limit_bytes)
        return self.report("usage", CacheUsage, nothing)

    def blocks(self) -> Blocks:
        return self.report("blocks", Blocks, Blocks())

    def count_tokens(self, seats: Iterable[Seat] | None = None) -> KVTokens:
        """Return the committed tokens of open sequences, by default of all; after a fault, as if none was dropped."""
        seats = list(self._open.values() if seats is None else seats)
        total, dropped = 0, 0
        try:
            with self.region["count_dropped_tokens"]:
                total = sum(check_int("the length of a seat", seat.length) for seat in seats)
                if not self.contract.exact:
                    dropped = sum(self._count_dropped_tokens(seat) for seat in seats)
        except StrategyError:
            dropped = 0
        return KVTokens(total - dropped, dropped)

    def _count_dropped_tokens(self, seat: Seat) -> int:
        return check_int("the number of dropped tokens", self.strategy.count_dropped_tokens(seat), seat.length)

    def token_budget(self, length: int) -> int | None:
        """Return how many tokens of a text are kept at most; None: there is no budget, or after a fault."""
        if self.is_suspended:
            return None
        try:
            with self.region["token_budget"]:
                budget = self.strategy.token_budget(length)
                return None if budget is None else check_int("the budget", budget, length)
        except StrategyError:
            return None

    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        """Return up to `limit` nodes of the tree of cached prefixes, and the number of others; after a fault, none."""
        if not isinstance(self.strategy, PrefixListing):
            return (), 0
        nothing: tuple[Sequence[CachedPrefix], int] = ((), 0)
        kind = tuple[Annotated[list[CachedPrefix], msgspec.Meta(max_length=limit)], int]
        return self.report("list_prefixes", kind, nothing, limit)

    def read_block_states(self, region: MemoryRegion) -> Tensor:
        """Return the `BlockState` by page of a region, uint8: of its blocks at their first pages, FREE elsewhere.

        Blocks are IN_USE if the strategy marks none, or after a fault.
        """
        states = torch.zeros(region.placement.extent, dtype=torch.uint8)
        used = torch.tensor(region.placement.list_used(), dtype=torch.int64)
        states[used] = int(BlockState.IN_USE)
        if self.is_suspended or not isinstance(self.strategy, BlockMarking):
            return states
        marks = states.clone()
        try:
            with self.region["mark_blocks"]:
                self.strategy.mark_blocks(region, marks)
                if marks.shape != states.shape or marks.dtype != states.dtype:
                    raise ValueError(f"it turned the states, {list(states.shape)}, into {list(marks.shape)}")
                is_known = (marks[used] > int(BlockState.FREE)) & (marks[used] <= max(BlockState))
                states[used] = torch.where(is_known, marks[used], states[used])
        except StrategyError:
            pass
        return states

    def describe_block(self, region: MemoryRegion, block: int) -> BlockInfo | None:
        """Return what the strategy knows about one of its blocks, if anything."""
        if not isinstance(self.strategy, BlockDescribing):
            return None
        info: BlockInfo | None = self.report("describe_block", BlockInfo | None, None, region, block)
        return info

    def collect_block_events(self) -> BlockEvents | None:
        if not self._has_events or self.is_suspended:
            return None
        try:
            with self.region["collect_block_events"]:
                events = self.strategy.collect_block_events()
                return None if events is None else to_plain(events, BlockEvents)  # None after most steps
        except StrategyError:
            return None

    def check_integrity(self) -> None:
        """Check the strategy's bookkeeping; an AssertionError stays one, as it shows a bug."""
        if not self.is_suspended:
            self.strategy.check_integrity()

    # ---------------------------------------------------------------- calls
    def call(self, method: str, *args: Any, kind: Any = Any, **kwargs: Any) -> Any:
        """Return the result of an operator's command, as plain values of a type. Raises StrategyError."""
        self._check_in_use(method)
        with self.region[method]:
            return to_plain(getattr(self.strategy, method)(*args, **kwargs), kind)

    def _call_quietly(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method; a fault is counted and logged, and ends nothing."""
        if self.is_suspended:
            return
        try:
            with self.region[method]:
                getattr(self.strategy, method)(*args, **kwargs)
        except StrategyError:
            return

    def _check_in_use(self, method: str) -> None:
        if self.is_suspended:
            raise StrategyError(self.name, method, "the instance is in quarantine")


def _check_found(seat: Seat, length: int) -> None:
    """Raise TypeError or ValueError unless what a seat says of its cached tokens can be sent to a client."""
    check_int("the number of cached tokens of a seat", seat.cached, length)
    if seat.miss not in MISSES:
        raise ValueError(f"a seat has the unknown miss {describe(seat.miss)}")


def check_int(what: str, found: Any, most: int = 2**62) -> int:
    """Return an int from 0 to `most`. Raises TypeError or ValueError for anything else."""
    if type(found) is not int:
        raise TypeError(f"{what} is {describe(found)}, not an int")
    if not 0 <= found <= most:
        raise ValueError(f"{what} is {found}, which must be from 0 to {most}")
    return found


def to_plain(found: Any, kind: Any) -> Any:
    """Return what a method reported as values of a type. Raises ValueError or TypeError if JSON cannot hold them."""
    builtins = msgspec.to_builtins(found, enc_hook=operator.index)  # of numpy's integers
    size = len(json.dumps(builtins, allow_nan=False, ensure_ascii=False).encode())  # refuses halves of surrogate pairs
    if size > MAX_REPORT_BYTES:
        raise ValueError(f"it returned {size} bytes of JSON, more than {MAX_REPORT_BYTES}")
    return msgspec.convert(builtins, kind)


def _overrides(strategy: KVCache, method: str) -> bool:
    """Return whether a strategy has a method of its own: that of the base class does nothing, and is not called."""
    return getattr(getattr(strategy, method), "__func__", None) is not getattr(KVCache, method)
