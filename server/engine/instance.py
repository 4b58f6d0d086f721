"""A strategy instance as the engine uses it: its strategy, and what the engine knows of it.

The engine calls a strategy under guards only (guard.py), so that its faults end requests of this instance and no
others. What could harm others is checked: new sequences, numbers that the engine computes with, memory that plug-ins
name. All else that a strategy may do wrongly harms its own requests, and is found by the kit (plugin_kit). Knows
neither requests nor what follows from a fault (isolation/quarantine.py).
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from torch import Tensor

from cache_strategies.base import KVCache, KVSequence, Locations, Rows
from cache_strategies.errors import StrategyError
from cache_strategies.features import (
    BlockCounting,
    Pinning,
    SelfChecking,
)
from cache_strategies.memory import Memory, Region
from cache_strategies.states.cache import StateCache, StateSequence
from cache_strategies.types import (
    NO_SALT,
    BlockEvents,
    Contract,
    Miss,
    Salt,
    Text,
)
from cache_strategies.visible import count_dropped_tokens
from kernels.ops import KVLocation, QueryTap
from kernels.states import States
from server.engine.calls import CallObserver, NoObserver
from server.engine.guard import Guards
from server.engine.isolation.checks import check_int, check_locations, check_owner, check_tap, describe, to_plain
from server.records import Compaction, FoundPrefix

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL = 60.0  # seconds between two log messages about faults of the same method
MISSES = {*get_args(Miss), None}


class LocatedRows(NamedTuple):
    """The rows of an instance in a step, and where a strategy has located their keys."""

    rows: Rows
    locations: Sequence[KVLocation | None]  # by layer
    tap: QueryTap | None
    states: States | None  # of a model with state layers
    positions: Sequence[int]  # of each row's first token


class Instance:
    """A strategy instance of an engine."""

    def __init__(
        self, cache: KVCache, on_fault: Callable[[StrategyError], None], observer: CallObserver | None = None
    ) -> None:
        """Use a strategy, perhaps beside states; `on_fault` is called with each fault, once.

        `observer` sees what is running.
        """
        self.name = cache.name
        self.memory: Memory = cache.setup.memory.shared
        self._on_fault = on_fault
        self._log_again_at: dict[str, float] = {}  # by method: when a fault of it is logged again
        self.guard = Guards(self.name, self.make_fault, observer or NoObserver())
        # By id, as a strategy's class of sequence may have no hash, or one that changes
        self._open: dict[int, KVSequence] = {}
        self.use(cache)

    def use(self, cache: KVCache) -> None:
        """Use another cache of the same setup from now on. No sequence may be open."""
        assert not self._open
        self.cache, self.is_suspended, self._keeps_idle_blocks = cache, False, False
        self.states = cache if isinstance(cache, StateCache) else None  # beside the strategy, if the model has any
        self.strategy = strategy = cache if self.states is None else self.states.strategy
        self.setup, self.contract = cache.setup, cache.contract
        self._bytes_by_tokens: dict[int, int] = {}
        self._is_plugin = hasattr(strategy, "interface_version")  # then what it locates is checked before it is used
        self.forks = True  # whether its sequences can be forked; known once there is one
        self._polls = getattr(cache.poll, "__func__", None) is not KVCache.poll
        # Asked once: isinstance() of a protocol takes 20 us, and this is called after each step
        self._block_counting = strategy if isinstance(strategy, BlockCounting) else None
        self.memory.set_owner(self.name, self)

    def rebuild(self, make: Callable[[], KVCache]) -> None:
        """Use the cache that `make` builds. Raises StrategyError if that fails. No sequence may be open."""
        try:
            with self.guard["__init__"]:
                cache = make()
                assert isinstance(cache.contract, Contract)
        except StrategyError:
            self.memory.release_all(self.name)
            raise
        self.use(cache)

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
        ids: Sequence[int],
        *,
        salt: Salt = NO_SALT,
        max_cached: int | None = None,
        priority: int = 0,
        ttl: float | None = None,
    ) -> KVSequence | None:
        """Open a sequence for a text, as `KVCache.open` and `Text` say. Raises StrategyError."""
        self._check_in_use("open")
        text = Text(ids, salt, max_cached, priority, ttl)
        with self.guard["open"]:
            opened = self.cache.open(text)
            if opened is not None:
                self._add(opened, text.num_reusable)
        return opened

    def fork(self, sequence: KVSequence, length: int) -> KVSequence | None:
        """Return a second sequence with the `length` tokens of a sequence; None if there is none now."""
        with self.guard["fork"]:
            child = sequence.fork()
            if child is not None:
                self._add(child, length, least=length)
        return child

    def _add(self, added: Any, most: int, least: int = 0) -> None:
        """Add a new sequence. Raises TypeError or ValueError, after closing it, if it is not sound."""
        if id(added) in self._open:
            raise ValueError("it returned a sequence that is open already")
        try:
            if not isinstance(added, KVSequence):
                raise TypeError(f"it returned {describe(added)}, not a KVSequence")
            if check_int("the length of a new sequence", added.length, most) < least:
                raise ValueError(f"a new sequence has length {added.length} instead of {least}")
            _check_found(added, added.length)
            check_int("the room of a new sequence", added.room)
            self.forks = self._overrides(added, "fork")
        except BaseException:
            self._close(added)
            raise
        self._open[id(added)] = added

    def close(self, sequence: KVSequence) -> None:
        del self._open[id(sequence)]
        self._close(sequence)

    def _close(self, sequence: Any) -> None:
        self.attempt("close", lambda: sequence.close(), None)

    def mark_spoiled(self, sequence: KVSequence) -> None:
        """Keep others from reusing NaN; called before close()."""
        self.attempt("close", lambda: setattr(sequence, "spoiled", True), None)

    def read_length(self, sequence: KVSequence, known: int) -> int:
        """Return the length of a sequence of which no row was committed; called under a guard.

        It may fall, if another sequence was closed that computed shared tokens.
        """
        return check_int("the length of a sequence", sequence.length, known)

    def read_found(self, sequence: KVSequence, length: int) -> FoundPrefix:
        """Return how many of the `length` tokens of a sequence were found in the cache, and why not more."""
        with self.guard["commit"]:
            _check_found(sequence, length)
            return FoundPrefix(sequence.found, sequence.miss, getattr(sequence, "recomputed", 0))

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

    def _count_bytes(self, guard: str, num_tokens: int) -> int:
        self._check_in_use(guard)
        if (known := self._bytes_by_tokens.get(num_tokens)) is not None:
            return known
        with self.guard[guard]:
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
        if self._keeps_idle_blocks:
            return 0
        idle = self.attempt("idle_bytes", lambda: operator.index(self.cache.idle_bytes), 0)
        return max(0, min(idle, self.memory.get_held_bytes(self.name)))

    def evict(self, num_bytes: int) -> int:
        """Free idle blocks; the bytes freed are counted by the memory, not taken from the strategy.

        If they are fewer than idle_bytes promised, no block counts as idle any more: others could not get its memory.
        """
        before, promised = self.memory.get_held_bytes(self.name), min(num_bytes, self.idle_bytes)
        self.attempt("evict", lambda: self.cache.evict(num_bytes), 0)
        freed = max(0, before - self.memory.get_held_bytes(self.name))
        if freed < promised:
            self._keeps_idle_blocks = True
            self.make_fault("evict", f"it freed {freed} of {promised} idle bytes")
        return freed

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        """Return the pinned blocks by region, which cannot be evicted."""
        strategy = self.strategy
        if not isinstance(strategy, Pinning):
            return {}

        def list_own() -> Mapping[Region, Collection[int]]:
            pinned, own = strategy.pinned_blocks(), self.memory.list_regions(self.name)
            return {region: {*map(operator.index, pinned[region])} for region in own if region in pinned}

        return self.attempt("pinned_blocks", list_own, {})

    def count_pinned_bytes(self) -> int:
        return sum(len(blocks) * region.size for region, blocks in self.pinned_blocks().items())

    def count_unused_bytes(self) -> int:
        """Return how many bytes the instance holds for neither sequences nor reuse nor pins."""
        held = self.memory.get_held_bytes(self.name)
        return max(0, held - self.idle_bytes - self.count_pinned_bytes()) if held else 0

    # ---------------------------------------------------------------- a step
    def poll(self) -> None:
        if self._polls:
            self.attempt("poll", self.cache.poll, None)

    def locate(self, rows: Rows, lengths: Sequence[int]) -> LocatedRows:
        """Let the strategy locate rows after `lengths` tokens; what plug-ins say is checked. Raises StrategyError."""
        with self.guard["locate"]:
            locations, tap, states = Locations(*self.cache.locate(rows))
            starts = zip(lengths, rows.sequences, strict=True)
            positions = [operator.index(length - each.shift) for length, each in starts]
            located = LocatedRows(rows, locations, tap, states, positions)
            if self._is_plugin:
                self._check_located(located)
            most = self.setup.geometry.max_seq_len
            for num_tokens, position in zip(rows.counts, positions, strict=True):
                if not 0 <= position <= most - num_tokens:
                    raise ValueError(f"a sequence has the position {describe(position)}, and the model has {most}")
        return located

    def check_located(self, located: LocatedRows) -> None:
        """Raise StrategyError if a strategy's addresses or its query tap are wrong: called after a step has failed."""
        with self.guard["locate"]:
            self._check_located(located)

    def _check_located(self, located: LocatedRows) -> None:
        """Raise TypeError or ValueError if a strategy's addresses or its tap are wrong."""
        geometry, num_tokens = self.setup.geometry, located.rows.num_tokens
        if len(located.locations) != len(geometry.layers):
            raise ValueError(f"it located {len(located.locations)} layers, and the model has {len(geometry.layers)}")
        check_locations(located.locations)
        self.setup.check_slots(located.locations, num_tokens)
        if self._is_plugin:
            check_owner(located.locations, self.memory, self.name)
        if located.tap is not None:
            check_tap(located.tap, num_tokens, geometry)

    def attend(self, rows: Rows, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Let a strategy compute a layer for its rows, as `KVCache.attend` says. Raises StrategyError."""
        with self.guard["attend"]:
            self.cache.attend(layer, rows, q, k, v, out)

    def count_committable(self, rows: Rows, num_entered: list[int]) -> list[int]:
        """Return how many of the first num_entered[i] tokens of each row can be committed.

        They are fewer if drafts were rejected and the model has states, which are there at some places only.
        """
        if self.states is None:
            return num_entered
        rows_of_states: Sequence[Any] = rows.sequences
        return [each.count_committable(count) for each, count in zip(rows_of_states, num_entered, strict=True)]

    def commit(self, rows: Rows, tokens: Sequence[Sequence[int]]) -> None:
        """Commit tokens to the sequences of rows, in their order. Raises StrategyError."""
        with self.guard["commit"]:
            for each, ids in zip(rows.sequences, tokens, strict=True):
                if ids:
                    each.commit(ids)

    def compacts(self, sequence: KVSequence) -> bool:
        """Return whether sequences of this type drop tokens."""
        return self._overrides(sequence, "compact")

    def _overrides(self, sequence: KVSequence, method: str) -> bool:
        """Return whether the strategy's sequences have a method of their own: else it does nothing."""
        cls = type(sequence.keys if isinstance(sequence, StateSequence) else sequence)
        return getattr(cls, method) is not getattr(KVSequence, method)

    def compact(self, sequence: KVSequence, length: int) -> Compaction | None:
        """Compact a sequence of `length` tokens, and try once more if that fails. Raises StrategyError if both fail.

        Return the compaction (of both tries); None if nothing was compacted.
        """
        began = time.perf_counter()
        try:
            has_dropped = self._compact(sequence)
        except StrategyError:
            has_dropped = self._compact(sequence)
        if not has_dropped:
            return None
        seconds = time.perf_counter() - began
        return Compaction(
            seconds, max(0, self.count_dropped_tokens([length]) - self.count_dropped_tokens([length - 1]))
        )

    def _compact(self, sequence: KVSequence) -> bool:
        with self.guard["compact"]:
            return bool(sequence.compact())

    # ---------------------------------------------------------------- what it says of itself (instance_reports.py)
    def read_lengths(self) -> list[int]:
        """Return the lengths of all open sequences; none after a fault."""
        opened = self._open.values()
        return self.attempt("usage", lambda: [check_int("the length of a sequence", s.length) for s in opened], [])

    def count_dropped_tokens(self, lengths: Iterable[int]) -> int:
        """Return how many tokens of sequences with these lengths are dropped (visible.py); 0 after a fault."""

        def count(length: int) -> int:
            return check_int("the number of dropped tokens", count_dropped_tokens(self.strategy, length), length)

        return self.attempt("count_visible", lambda: sum(map(count, lengths)), 0)

    def collect_block_events(self) -> BlockEvents | None:
        """Return what has happened to blocks since the last call."""
        strategy = self._block_counting
        if strategy is None:
            return None

        def collect() -> BlockEvents | None:
            events = strategy.collect_block_events()
            return None if events is None else to_plain(events, BlockEvents)  # None after most steps

        return self.attempt("collect_block_events", collect, None)

    def check_integrity(self) -> None:
        """Check the strategy's bookkeeping; an AssertionError stays one, as it shows a bug."""
        if not self.is_suspended and isinstance(self.cache, SelfChecking):
            self.cache.check_integrity()

    # ---------------------------------------------------------------- calls
    def call(self, method: str, *args: Any, kind: Any = Any, **kwargs: Any) -> Any:
        """Return the result of an operator's command, as plain values of a type. Raises StrategyError."""
        self._check_in_use(method)
        with self.guard[method]:
            target = self.cache if hasattr(self.cache, method) else self.strategy
            return to_plain(getattr(target, method)(*args, **kwargs), kind)

    def attempt(self, guard: str, run: Callable[[], T], default: T) -> T:
        """Return what is computed under a guard; in quarantine or after a fault, which ends nothing, the default."""
        if self.is_suspended:
            return default
        try:
            with self.guard[guard]:
                return run()
        except StrategyError:
            return default

    def _check_in_use(self, method: str) -> None:
        if self.is_suspended:
            raise StrategyError(self.name, method, "the instance is in quarantine")


def _check_found(sequence: KVSequence, length: int) -> None:
    """Raise TypeError or ValueError unless what a sequence says of its cached tokens can be sent to a client."""
    check_int("the number of found tokens of a sequence", sequence.found, length)
    if sequence.miss not in MISSES:
        raise ValueError(f"a sequence has the unknown miss {describe(sequence.miss)}")
