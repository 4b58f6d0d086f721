"""Faults that tests plant in a strategy: what goes wrong, in which method, and what must follow from it.

A fault replaces methods of one object, so that any strategy can get it (`faulty_strategies.py` has plug-ins with an
option for it). Knows neither engines nor servers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch

from cache_strategies.base import KVCache, Plan, Row, Seat
from cache_strategies.types import BlockEvents, Blocks, CacheUsage, Sizes
from kernels.ops import KVLocation, QueryTap
from kernels.store import KVStore

Plant = Callable[[KVCache], None]
Effect = Literal[
    "ends",  # the requests of the instance end with an error that names it and the method
    "stalls",  # likewise, once strategy_timeout is over
    "quiet",  # requests get right answers; the fault is logged and counted
    "leaks",  # likewise; the instance is in quarantine once strategy_timeout is over
    "nan",  # the requests of the instance end with the error not_a_number
    "none",  # requests get right answers, and nothing is logged
    "own",  # whatever becomes of the instance's own requests, others are right; the kit finds the fault
    "hangs",  # a call never returns
]


@dataclass(frozen=True)
class Fault:
    """A fault of one instance."""

    method: str  # the method that is named in errors
    plant: Plant
    effect: Effect = "ends"
    hook: bool = False  # whether it is one of a strategy that computes its own attention
    body: Mapping[str, Any] = field(default_factory=dict)  # fields of a request that meets the fault


# ---------------------------------------------------------------- ways to go wrong
class Unprintable(Exception):
    """An error, or a result, that cannot be written into a message."""

    def __str__(self) -> str:
        raise RuntimeError("planted")

    __repr__ = __str__


class UnhashableSeat(Seat):
    """A seat as a dataclass would be: with an __eq__ of its own, and thus without a hash."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


def returning(method: str, value: Any) -> Plant:
    """Return a fault: the method returns a value of no use; a function is called with the right result."""

    def plant(cache: KVCache) -> None:
        right = getattr(cache, method)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            return value(found) if callable(value) else value

        setattr(cache, method, wrong)

    return plant


def raising(method: str, error: type[BaseException] = RuntimeError) -> Plant:
    def fail(*_: Any, **__: Any) -> None:
        raise error("planted")

    return replaced(method, fail)


def ignoring(method: str, value: Any = None) -> Plant:
    """Return a fault: the method does nothing and returns a value."""
    return lambda cache: setattr(cache, method, lambda *_, **__: value)


def _recur(*args: Any, **kwargs: Any) -> Any:
    return _recur(*args, **kwargs)


def _hang(*_: Any, **__: Any) -> None:
    while True:
        pass


def replaced(method: str, function: Callable[..., Any]) -> Plant:
    """Return a fault: a function takes the place of the method, under its name."""

    def plant(cache: KVCache) -> None:
        named = FunctionType(
            function.__code__.replace(co_name=method),
            function.__globals__,
            method,
            function.__defaults__,
            function.__closure__,
        )
        setattr(cache, method, named)

    return plant


def after_use(method: str, value: Any) -> Plant:
    """Return a fault: the method returns a wrong value from the first seat on."""

    def plant(cache: KVCache) -> None:
        right, open_seat, opened = getattr(cache, method), cache.open, False

        def wrong(*args: Any, **kwargs: Any) -> Any:
            return value if opened else right(*args, **kwargs)

        def note_and_open(*args: Any, **kwargs: Any) -> Any:
            nonlocal opened
            opened = True
            return open_seat(*args, **kwargs)

        setattr(cache, method, wrong)
        cache.open = note_and_open  # type: ignore[method-assign]

    return plant


def changing_seat(method: str, **fields: Any) -> Plant:
    """Return a fault: the method changes fields of the seat that it returns, or is called with."""

    def plant(cache: KVCache) -> None:
        right = getattr(cache, method)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            seat = found if isinstance(found, Seat) else args[0]
            seats = [row.seat for row in seat.rows] if isinstance(seat, Plan) else [seat]
            for each in seats:
                for name, value in fields.items():
                    setattr(each, name, value(getattr(each, name)) if callable(value) else value)
            return found

        setattr(cache, method, wrong)

    return plant


def _fail_at(seat: Seat) -> int:
    raise RuntimeError("planted")


def _without_length(seat: Seat) -> Seat:
    del seat.length
    return seat


def at_position(value: Any) -> Plant:
    """Return a fault: the seats of the strategy have this position; a function computes it."""

    def find(seat: Seat) -> Any:
        return value(seat) if callable(value) else value

    def plant(cache: KVCache) -> None:
        right = cache.open

        def wrong(*args: Any, **kwargs: Any) -> Seat | None:
            seat = right(*args, **kwargs)
            if seat is not None:
                seat.__class__ = type("SeatElsewhere", (type(seat),), {"__slots__": (), "position": property(find)})
            return seat

        cache.open = wrong  # type: ignore[method-assign]

    return plant


def changing_plan(change: Callable[[Plan], Plan]) -> Plant:
    """Return a fault: plan() returns a changed plan."""

    def plant(cache: KVCache) -> None:
        right = cache.plan

        def wrong(rows: Any) -> Plan:
            return change(copy(right(rows)))

        cache.plan = wrong  # type: ignore[method-assign]

    return plant


def with_attributes(**attributes: Any) -> Plant:
    """Return a fault: attributes of the plan are others."""

    def change(plan: Plan) -> Plan:
        vars(plan).update(attributes)
        return plan

    return changing_plan(change)


def with_location(change: Callable[[KVLocation], Any]) -> Plant:
    """Return a fault: what the plan says of all layers is changed."""

    def change_plan(plan: Plan) -> Plan:
        location = plan.kv_location(0)
        assert location is not None
        where = change(location)
        plan.kv_location = lambda layer_idx: where  # type: ignore[method-assign]
        return plan

    return changing_plan(change_plan)


def with_slots(**fields: Callable[[Any], Any]) -> Plant:
    """Return a fault: the addresses of the plan are changed."""

    def change(location: KVLocation) -> KVLocation:
        changed = {name: value(getattr(location.at, name)) for name, value in fields.items()}
        return location._replace(at=dataclasses.replace(location.at, **changed))

    return with_location(change)


def _plant_foreign_blocks(cache: KVCache) -> None:
    """Plant a fault: the addresses of the plan are in a region of another instance."""
    right, memory = cache.plan, cache.setup.memory.shared

    def wrong(rows: Any) -> Plan:
        plan = copy(right(rows))
        where = plan.kv_location(0)
        assert where is not None
        other = next(name for name in memory.instances if name != cache.name and memory.list_regions(name))
        layers = dict(enumerate(cache.setup.geometry.layers))
        store = KVStore(memory.list_regions(other)[0], layers, where.store.block_size, where.store.dtype)
        at = dataclasses.replace(where.at, table=torch.zeros_like(where.at.table))
        plan.kv_location = lambda layer_idx: KVLocation(store, at, where.window)  # type: ignore[method-assign]
        return plan

    cache.plan = wrong  # type: ignore[method-assign]


def with_property(name: str, read: Callable[[Any], Any]) -> Plant:
    """Return a fault: a property has the value that `read` returns for the cache."""

    def plant(cache: KVCache) -> None:
        cls = type(cache)
        cache.__class__ = type(cls.__name__, (cls,), {name: property(read)})

    return plant


# What is wrong with the numbers of blocks by region, for all lengths of texts but the longest
COUNTED: Mapping[str, Callable[[int], Any]] = {
    "sizes raise": lambda num_tokens: [1 // 0],
    "sizes are None": lambda num_tokens: None,
    "sizes are negative": lambda num_tokens: [-1],
    "sizes are fractions": lambda num_tokens: [1.5],
}


def change_sizes(right: Sizes, fault: str, longest: int) -> Sizes:
    """Return the sizes of an instance with a fault."""
    if (wrong := COUNTED.get(fault)) is None:
        return right
    return right._replace(count_blocks=lambda n: right.count_blocks(n) if n == longest else wrong(n))


def in_attend(run: Callable[[Any], None]) -> Plant:
    """Return a fault of a strategy that computes its own attention; `run` gets the plan's attend and its arguments."""

    def change(plan: Plan) -> Plan:
        attend = plan.attend
        plan.attend = lambda *args: run((attend, args))  # type: ignore[method-assign]
        return plan

    return changing_plan(change)


def _fail(_: Any) -> None:
    raise RuntimeError("planted")


def _exit(_: Any) -> None:
    raise SystemExit(3)


def _write_half(call: Any) -> None:
    attend, args = call
    out = args[-1].clone()
    attend(*args[:-1], out)
    args[-1][:, : out.shape[1] // 2] = out[:, : out.shape[1] // 2]


def _write_wrong_shape(call: Any) -> None:
    _, args = call
    args[-1].copy_(torch.zeros(args[-1].shape[0] + 1, *args[-1].shape[1:]))


def _write_nan(call: Any) -> None:
    attend, args = call
    attend(*args)
    args[-1].fill_(math.nan)


def _sleep(call: Any) -> None:
    attend, args = call
    time.sleep(0.002)
    attend(*args)


def _other_rows(plan: Plan) -> Plan:
    plan.rows = [Row(row.seat, row.num_tokens + 1) for row in plan.rows]
    return plan


def _without_rows(cache: KVCache) -> None:
    """Plant a fault: plan() empties the list that was passed to it."""
    right = cache.plan

    def wrong(rows: Any) -> Plan:
        plan = right(rows)
        rows.clear()
        return plan

    cache.plan = wrong  # type: ignore[method-assign]


def _no_location(plan: Plan) -> Plan:
    plan.kv_location = _fail  # type: ignore[method-assign,assignment]
    return plan


def _poison_keys(cache: KVCache) -> None:
    """Plant a fault: the keys of committed tokens become NaN."""
    right = cache.commit

    def wrong(plan: Plan, tokens: Any) -> None:
        right(plan, tokens)
        for row in plan.rows:
            for block in row.seat.blocks:  # type: ignore[attr-defined]
                cache.stores[0].k(0)[block].fill_(math.nan)

    cache.commit = wrong  # type: ignore[method-assign]


def _poison_keys_and_fail(cache: KVCache) -> None:
    _poison_keys(cache)
    raising("discard")(cache)


def _fail_late() -> Iterator[int]:
    yield 0
    raise ValueError("planted")


def _any(value: Any) -> Any:
    """Return a value of a wrong type."""
    return value


def _count_of_words(kind: Any) -> Any:
    return kind(*["many"] * len(kind._fields))


# ---------------------------------------------------------------- faults
TWO = {"n": 2, "temperature": 1.0, "seed": 1}
DRAFTS = {"speculative_config": {"num_speculative_tokens": 4, "prompt_lookup_min": 1}}

FAULTS: Mapping[str, Fault] = {
    **{
        f"{name} raises": Fault(name, raising(name))
        for name in ("open", "ready", "row_limit", "grow", "plan", "commit", "compact")
    },
    **{f"{name} returns None": Fault(name, ignoring(name)) for name in ("plan",)},
    **{f"{name} returns None": Fault(name, ignoring(name), "stalls") for name in ("ready", "grow")},
    "open ends the process": Fault("open", raising("open", SystemExit)),
    "plan is cancelled": Fault("plan", raising("plan", asyncio.CancelledError)),
    "grow has no memory": Fault("grow", raising("grow", MemoryError)),
    "ready recurs for ever": Fault("ready", replaced("ready", _recur)),
    "commit raises an error without a text": Fault("commit", raising("commit", Unprintable)),
    "ready returns an object without a text": Fault("ready", returning("ready", Unprintable()), "own"),
    "open returns an object": Fault("open", returning("open", object())),
    "open returns a seat without a hash": Fault("plan", returning("open", lambda _: UnhashableSeat())),
    "open returns a seat without fields": Fault("open", returning("open", _without_length)),
    "open returns a seat of -1 tokens": Fault("open", changing_seat("open", length=-1)),
    "open returns a seat of all tokens": Fault("open", changing_seat("open", length=10_000)),
    "open returns a seat without a length": Fault("open", changing_seat("open", length=None)),
    "open finds too many tokens": Fault("open", changing_seat("open", cached=9_999)),
    "open invents a miss": Fault("open", changing_seat("open", miss="bad luck")),
    "open has a list of misses": Fault("open", changing_seat("open", miss=[])),
    "ready returns a word": Fault("ready", returning("ready", "yes"), "own"),
    "grow returns a number": Fault("grow", returning("grow", 1), "own"),
    "grow lengthens the seat": Fault("grow", changing_seat("grow", length=lambda n: n + 1), "own"),
    "grow makes the length a tensor": Fault(
        "grow", changing_seat("grow", length=lambda n: torch.tensor([n, n])), "own"
    ),
    "row_limit is 0": Fault("row_limit", ignoring("row_limit", 0)),
    "row_limit is a word": Fault("row_limit", ignoring("row_limit", "many")),
    "compact shortens the seat": Fault("compact", changing_seat("compact", length=lambda n: n - 1), "own"),
    **{  # the strategy is exact, so it has no token to drop
        f"compact dropped {value}": Fault("compact", ignoring("compact", value)) for value in (-1, 0.5, "many", True)
    },
    **{f"compact dropped {value}": Fault("compact", ignoring("compact", value), "own") for value in (10_000, 1)},
    "compact drops nothing": Fault("compact", ignoring("compact", 0), "none"),
    **{what: Fault("sizes", lambda cache: None) for what in COUNTED},  # planted in the class
    "a position before the text": Fault("plan", at_position(-1)),
    "a position beyond those of the model": Fault("plan", at_position(10**6)),
    "a position that is a tensor": Fault("plan", at_position(torch.tensor(0)), "own"),
    "a position that is no number": Fault("plan", at_position(None)),
    "a position that raises": Fault("plan", at_position(_fail_at)),
    "plan returns a word": Fault("plan", returning("plan", "plan")),
    "plan has other rows": Fault("plan", changing_plan(_other_rows), "own"),
    "plan has no rows": Fault("plan", with_attributes(rows=[])),
    "plan empties its rows": Fault("plan", _without_rows),
    "plan has None for rows": Fault("plan", with_attributes(rows=None)),
    "plan has a word for a tap": Fault("plan", with_attributes(query_tap="tap")),
    "plan taps tokens of others": Fault("plan", with_attributes(query_tap=QueryTap(torch.tensor([999]), [None] * 99))),
    "kv_location raises": Fault("plan", changing_plan(_no_location)),
    "kv_location returns a word": Fault("plan", with_location(lambda _: "there")),
    "kv_location has a word for a window": Fault(
        "plan", with_location(lambda where: where._replace(window=_any("wide")))
    ),
    "kv_location is None without attend": Fault("attend", with_location(lambda _: None)),
    "blocks beyond the store": Fault("plan", with_slots(table=lambda t: t + 1_000_000)),
    "blocks of another strategy": Fault("plan", _plant_foreign_blocks),
    "negative blocks": Fault("plan", with_slots(table=lambda t: -1 - t)),
    "rows beyond the table": Fault("plan", with_slots(table_row=lambda t: t + 1_000)),
    "tokens beyond the table": Fault("plan", with_slots(start=lambda t: t + 100_000)),
    "other numbers of tokens": Fault("plan", with_slots(q_start=lambda t: t * 2)),
    "addresses of another type": Fault("plan", with_slots(start=lambda t: t.long())),
    "too few addresses": Fault("plan", with_slots(start=lambda t: t[:0])),
    "blocks of another size": Fault("plan", with_slots(block_size=lambda n: n // 2)),
    "commit does nothing": Fault("commit", ignoring("commit"), "own"),
    "commit forgets the cached tokens": Fault("commit", changing_seat("commit", cached=None)),
    "commit advances too far": Fault("commit", changing_seat("commit", length=lambda n: n + 3), "own"),
    "commit forgets the length": Fault("commit", changing_seat("commit", length=None), "own"),
    "commit makes the length a fraction": Fault("commit", changing_seat("commit", length=float), "own"),
    "commit makes the length a tensor": Fault(
        "commit", changing_seat("commit", length=lambda n: torch.tensor([n, n])), "own"
    ),
    "crop raises": Fault("crop", raising("crop"), body=DRAFTS),
    "crop drops nothing": Fault("crop", changing_seat("crop", length=lambda n: n + 1), body=DRAFTS),
    # ---------------------------------------------------------------- a strategy that computes its own attention
    "attend raises": Fault("attend", in_attend(_fail), hook=True),
    "attend ends the process": Fault("attend", in_attend(_exit), hook=True),
    "attend writes nothing": Fault("attend", in_attend(lambda call: None), "own", hook=True),
    "attend writes half of the heads": Fault("attend", in_attend(_write_half), "own", hook=True),
    "attend writes another shape": Fault("attend", in_attend(_write_wrong_shape), hook=True),
    "attend writes NaN": Fault("attend", in_attend(_write_nan), "nan", hook=True),
    "attend is slow": Fault("attend", in_attend(_sleep), "none", hook=True),
    "keys become NaN": Fault("commit", _poison_keys, "nan"),
    "keys become NaN, discard raises": Fault("discard", _poison_keys_and_fail, "nan"),
    # ---------------------------------------------------------------- calls that concern no single request
    **{
        f"{name} raises": Fault(name, raising(name), "quiet")
        for name in (
            "retain",
            "close",
            "poll",
            "usage",
            "blocks",
            "collect_block_events",
            "pinned_blocks",
            "token_budget",
        )
    },
    "idle_bytes raises": Fault("idle_bytes", with_property("idle_bytes", _fail), "quiet"),
    "count_dropped_tokens raises": Fault("count_dropped_tokens", raising("count_dropped_tokens"), "own"),
    "poll ends the process": Fault("poll", raising("poll", SystemExit), "quiet"),
    "usage returns None": Fault("usage", ignoring("usage"), "quiet"),
    "usage has words": Fault("usage", ignoring("usage", _count_of_words(CacheUsage)), "quiet"),
    "usage has NaN": Fault("usage", ignoring("usage", CacheUsage(*_any([math.nan] * 7))), "quiet"),
    "blocks returns a number": Fault("blocks", ignoring("blocks", 3), "quiet"),
    "blocks has words": Fault("blocks", ignoring("blocks", _count_of_words(Blocks)), "quiet"),
    "idle_bytes is a word": Fault("idle_bytes", with_property("idle_bytes", lambda cache: "many"), "quiet"),
    "pinned_blocks returns a number": Fault("pinned_blocks", ignoring("pinned_blocks", 3), "quiet"),
    "pinned_blocks raises while it is read": Fault("pinned_blocks", replaced("pinned_blocks", _fail_late), "quiet"),
    "events are a word": Fault("collect_block_events", ignoring("collect_block_events", "events"), "quiet"),
    "events have words": Fault(
        "collect_block_events", ignoring("collect_block_events", _count_of_words(BlockEvents)), "quiet"
    ),
    "events have no times": Fault(
        "collect_block_events",
        ignoring("collect_block_events", BlockEvents(lifetimes=_any([None]))),
        "quiet",
    ),
    **{  # of an exact strategy, so that nobody asks how many tokens it has dropped
        f"count_dropped_tokens is {value}": Fault(
            "count_dropped_tokens", ignoring("count_dropped_tokens", value), "own"
        )
        for value in (None, 0.5, -1, 1, 10_000)
    },
    **{
        f"token_budget is {value}": Fault("token_budget", ignoring("token_budget", value), "quiet")
        for value in ("all", 0.5, -1, 10_000)
    },
    "token_budget is 1": Fault("token_budget", ignoring("token_budget", 1), "own"),
    "evict raises": Fault("evict", raising("evict"), "quiet"),
    "evict frees nothing": Fault("evict", ignoring("evict", 1), "quiet"),
    "idle_bytes promises all": Fault("idle_bytes", with_property("idle_bytes", lambda cache: 1 << 40), "none"),
    "fork raises": Fault("fork", raising("fork"), "quiet", body=TWO),
    "fork returns the same seat": Fault("fork", replaced("fork", lambda seat: seat), "quiet", body=TWO),
    "fork returns a word": Fault("fork", ignoring("fork", "child"), "quiet", body=TWO),
    # ---------------------------------------------------------------- nothing happens
    "never ready": Fault("ready", ignoring("ready", False), "stalls"),
    "never grows": Fault("grow", ignoring("grow", False), "stalls"),
    "never opens": Fault("open", ignoring("open", None), "stalls"),
    "never opens, with memory of its own": Fault("open", ignoring("open", None), "stalls", hook=True),
    "never grows, with memory of its own": Fault("grow", ignoring("grow", False), "stalls", hook=True),
    "never frees": Fault("close", ignoring("close"), "leaks"),
    "usage never returns": Fault("usage", replaced("usage", _hang), "hangs"),
    "open never returns": Fault("open", replaced("open", _hang), "hangs"),
    "attend never returns": Fault("attend", in_attend(_hang), "hangs", hook=True),
}


def select(*effects: Effect, hook: bool | None = None, plain: bool = False) -> dict[str, Fault]:
    """Return the faults with one of these effects, by name; `plain`: only those that any request meets."""
    return {
        name: fault
        for name, fault in FAULTS.items()
        if fault.effect in effects and hook in (None, fault.hook) and not (plain and fault.body)
    }
