"""Faults that tests plant in a strategy: what goes wrong, in which method, and what must follow from it.

A fault replaces methods of one object, so that any strategy can get it (`faulty_strategies.py` has plug-ins with an
option for it). Knows neither engines nor servers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import numpy as np
import torch

from cache_strategies.base import KVCache, KVSequence, Locations
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


class UnhashableSequence(KVSequence):
    """A sequence as a dataclass would be: with an __eq__ of its own, and thus without a hash."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def reserve(self, num_tokens: int) -> bool:
        raise RuntimeError("planted")

    def commit(self, ids: Sequence[int]) -> None:
        raise RuntimeError("planted")

    def close(self) -> None:
        raise RuntimeError("planted")


# Methods of sequences; all others that faults change are those of caches
OF_SEQUENCES = frozenset({"ready", "reserve", "commit", "compact", "truncate", "fork", "close"})


def _change(cache: KVCache, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` returns for the right method in its place, under its name."""
    if method not in OF_SEQUENCES:
        setattr(cache, method, _name(make(getattr(cache, method)), method))
        return

    def change(opened: Any) -> Any:
        if opened is not None:
            cls = type(opened)
            right = getattr(cls, method)
            opened.__class__ = type(cls.__name__, (cls,), {method: _name(make(right), method)})
            opened.room = 0  # so that reserve() is called for each row
        return opened

    right_open: Any = cache.open
    cache.open = lambda text: change(right_open(text))  # type: ignore[method-assign]


def _name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function under another name, which errors tell."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def replaced(method: str, function: Callable[..., Any]) -> Plant:
    """Return a fault: a function takes the place of the method."""
    return lambda cache: _change(cache, method, lambda right: function)


def returning(method: str, value: Any) -> Plant:
    """Return a fault: the method returns a value of no use; a function is called with the right result."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            return value(found) if callable(value) else value

        return wrong

    return lambda cache: _change(cache, method, make)


def raising(method: str, error: type[BaseException] = RuntimeError) -> Plant:
    def fail(*_: Any, **__: Any) -> None:
        raise error("planted")

    return replaced(method, fail)


def ignoring(method: str, value: Any = None) -> Plant:
    """Return a fault: the method does nothing and returns a value."""

    def ignore(*_: Any, **__: Any) -> Any:
        return value

    return replaced(method, ignore)


def _recur(*args: Any, **kwargs: Any) -> Any:
    return _recur(*args, **kwargs)


def _hang(*_: Any, **__: Any) -> None:
    while True:
        pass


def changing_sequence(method: str, **fields: Any) -> Plant:
    """Return a fault: the method changes fields of the sequence that it returns, or whose method it is."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            changed = found if isinstance(found, KVSequence) else args[0]
            for name, value in fields.items():
                setattr(changed, name, value(getattr(changed, name)) if callable(value) else value)
            return found

        return wrong

    return lambda cache: _change(cache, method, make)


def with_field(name: str, value: Any) -> Plant:
    """Return a fault: a field of sequences has a value; a function computes it."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(text: Any) -> Any:
            opened = right(text)
            if opened is not None:
                cls = type(opened)
                read = value if callable(value) else lambda self: value
                members = {name: property(read, lambda self, new: None)}
                opened.__class__ = type(cls.__name__, (cls,), members)
            return opened

        return wrong

    return lambda cache: _change(cache, "open", make)


def _fail_at(sequence: KVSequence) -> int:
    raise RuntimeError("planted")


def changing_locations(change: Callable[[Locations], Any]) -> Plant:
    """Return a fault: locate() returns something else."""
    return returning("locate", change)


def with_location(change: Callable[[KVLocation], Any]) -> Plant:
    """Return a fault: what locate() says of all layers is changed."""

    def change_all(found: Locations) -> Locations:
        first = found.by_layer[0]
        assert first is not None
        return found._replace(by_layer=[change(first)] * len(found.by_layer))

    return changing_locations(change_all)


def with_slots(**fields: Callable[[Any], Any]) -> Plant:
    """Return a fault: the addresses of a step are changed."""

    def change(location: KVLocation) -> KVLocation:
        changed = {name: value(getattr(location.at, name)) for name, value in fields.items()}
        return location._replace(at=dataclasses.replace(location.at, **changed))

    return with_location(change)


def _plant_foreign_blocks(cache: KVCache) -> None:
    """Plant a fault: the addresses of a step are in a region of another instance."""
    memory = cache.setup.memory.shared

    def change(where: KVLocation) -> KVLocation:
        other = next(name for name in memory.instances if name != cache.name and memory.list_regions(name))
        layers = dict(enumerate(cache.setup.geometry.layers))
        store = KVStore(memory.list_regions(other)[0], layers, where.store.block_size, where.store.formats)
        at = dataclasses.replace(where.at, table=torch.zeros_like(where.at.table))
        return KVLocation(store, at, where.window)

    with_location(change)(cache)


def _plant_negative_allocation(cache: KVCache) -> None:
    """Plant a fault: open() allocates -3 blocks, as one does who subtracts what is there from what is needed."""
    right = cache.open

    def open_sequence(text: Any) -> Any:
        cache.setup.memory.regions[0].allocate(-3)
        return right(text)

    cache.open = _name(open_sequence, "open")  # type: ignore[method-assign]


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
    """Return a fault of a strategy that computes its own attention; `run` gets the right attend and its arguments."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any) -> None:
            run((right, args))

        return wrong

    return lambda cache: _change(cache, "attend", make)


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


def _poison_keys(cache: KVCache) -> None:
    """Plant a fault: the keys of committed tokens become NaN."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(sequence: Any, ids: Any) -> None:
            right(sequence, ids)
            for block in sequence.blocks:
                cache.stores[0].k(0)[block].fill_(math.nan)

        return wrong

    _change(cache, "commit", make)


def _plant_unspoilable(cache: KVCache) -> None:
    """Plant a fault: keys become NaN, and sequences do not let it be noted that they are spoiled."""
    _poison_keys(cache)
    right: Any = cache.open

    def open_sequence(text: Any) -> Any:
        opened = right(text)
        if opened is not None:
            cls = type(opened)
            opened.__class__ = type(cls.__name__, (cls,), {"spoiled": property(lambda self: False)})
        return opened

    cache.open = open_sequence  # type: ignore[method-assign]


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
        for name in ("open", "ready", "reserve", "locate", "commit", "compact")
    },
    "locate returns None": Fault("locate", ignoring("locate")),
    **{f"{name} returns None": Fault(name, ignoring(name), "stalls") for name in ("ready", "reserve")},
    "open ends the process": Fault("open", raising("open", SystemExit)),
    "locate is cancelled": Fault("locate", raising("locate", asyncio.CancelledError)),
    "reserve has no memory": Fault("reserve", raising("reserve", MemoryError)),
    "ready recurs for ever": Fault("ready", replaced("ready", _recur)),
    "commit raises an error without a text": Fault("commit", raising("commit", Unprintable)),
    "ready returns an object without a text": Fault("ready", returning("ready", Unprintable()), "own"),
    "open allocates fewer blocks than none": Fault("open", _plant_negative_allocation),
    "open returns an object": Fault("open", returning("open", object())),
    "open returns a sequence without a hash": Fault("reserve", returning("open", lambda _: UnhashableSequence())),
    "open returns a class": Fault("open", returning("open", type)),
    "open returns a sequence of -1 tokens": Fault("open", changing_sequence("open", length=-1)),
    "open returns a sequence of all tokens": Fault("open", changing_sequence("open", length=10_000)),
    "open returns a sequence without a length": Fault("open", changing_sequence("open", length=None)),
    "open finds too many tokens": Fault("open", changing_sequence("open", found=9_999)),
    "open invents a miss": Fault("open", changing_sequence("open", miss="bad luck")),
    "open has a list of misses": Fault("open", changing_sequence("open", miss=[])),
    "ready returns a word": Fault("ready", returning("ready", "yes"), "own"),
    "reserve returns a number": Fault("reserve", returning("reserve", 1), "own"),
    "reserve lengthens the text": Fault("reserve", changing_sequence("reserve", length=lambda n: n + 1), "own"),
    "reserve makes the length a tensor": Fault(
        "reserve", changing_sequence("reserve", length=lambda n: torch.tensor([n, n])), "own"
    ),
    "stop is 0": Fault("stop", with_field("stop", 0)),
    "stop is a word": Fault("stop", with_field("stop", "there")),
    "stop is a fraction": Fault("stop", with_field("stop", lambda sequence: sequence.length + 8.0)),
    "stop is a number of numpy": Fault("stop", with_field("stop", lambda sequence: np.int64(sequence.length + 8))),
    "stop raises": Fault("schedule", with_field("stop", _fail_at)),
    "room is a word": Fault("open", with_field("room", "much")),
    "compact shortens the text": Fault("compact", changing_sequence("compact", length=lambda n: n - 1), "own"),
    # The strategy is exact, so it has no token to drop
    **{f"compact returns {value}": Fault("compact", ignoring("compact", value), "own") for value in (True, 10_000)},
    "compact drops nothing": Fault("compact", ignoring("compact", False), "none"),
    **{what: Fault("sizes", lambda cache: None) for what in COUNTED},  # planted in the class
    "a position before the text": Fault("locate", with_field("shift", 10**6)),
    "a position beyond those of the model": Fault("locate", with_field("shift", -(10**6))),
    "a position that is a tensor": Fault("locate", with_field("shift", torch.tensor(0)), "own"),
    "a position that is no number": Fault("locate", with_field("shift", None)),
    "a position that is a fraction": Fault("locate", with_field("shift", 0.0)),
    "a position that raises": Fault("locate", with_field("shift", _fail_at)),
    "locate returns a word": Fault("locate", returning("locate", "there")),
    "locate forgets the layers": Fault("locate", changing_locations(lambda found: found._replace(by_layer=()))),
    "locate has None for layers": Fault("locate", changing_locations(lambda found: found._replace(by_layer=None))),
    "locate has a word for a tap": Fault("locate", changing_locations(lambda found: found._replace(tap="tap"))),
    "locate taps tokens of others": Fault(
        "locate", changing_locations(lambda found: found._replace(tap=QueryTap(torch.tensor([999]), [None] * 99)))
    ),
    "a location is a word": Fault("locate", with_location(lambda _: "there")),
    "a location has a word for a window": Fault(
        "locate", with_location(lambda where: where._replace(window=_any("wide")))
    ),
    "a location is None without attend": Fault("attend", with_location(lambda _: None)),
    "blocks beyond the store": Fault("locate", with_slots(table=lambda t: t + 1_000_000)),
    "blocks of another strategy": Fault("locate", _plant_foreign_blocks),
    "negative blocks": Fault("locate", with_slots(table=lambda t: -1 - t)),
    "rows beyond the table": Fault("locate", with_slots(table_row=lambda t: t + 1_000)),
    "tokens beyond the table": Fault("locate", with_slots(start=lambda t: t + 100_000)),
    "other numbers of tokens": Fault("locate", with_slots(q_start=lambda t: t * 2)),
    "addresses of another type": Fault("locate", with_slots(start=lambda t: t.long())),
    "too few addresses": Fault("locate", with_slots(start=lambda t: t[:0])),
    "blocks of another size": Fault("locate", with_slots(block_size=lambda n: n // 2)),
    "commit does nothing": Fault("commit", ignoring("commit"), "own"),
    "commit forgets the cached tokens": Fault("commit", changing_sequence("commit", found=None)),
    "commit advances too far": Fault("commit", changing_sequence("commit", length=lambda n: n + 3), "own"),
    "commit forgets the length": Fault("commit", changing_sequence("commit", length=None), "own"),
    "commit makes the length a fraction": Fault("commit", changing_sequence("commit", length=float), "own"),
    "commit makes the length a tensor": Fault(
        "commit", changing_sequence("commit", length=lambda n: torch.tensor([n, n])), "own"
    ),
    # ---------------------------------------------------------------- a strategy that computes its own attention
    "attend raises": Fault("attend", in_attend(_fail), hook=True),
    "attend ends the process": Fault("attend", in_attend(_exit), hook=True),
    "attend writes nothing": Fault("attend", in_attend(lambda call: None), "own", hook=True),
    "attend writes half of the heads": Fault("attend", in_attend(_write_half), "own", hook=True),
    "attend writes another shape": Fault("attend", in_attend(_write_wrong_shape), hook=True),
    "attend writes NaN": Fault("attend", in_attend(_write_nan), "nan", hook=True),
    "attend is slow": Fault("attend", in_attend(_sleep), "none", hook=True),
    "keys become NaN": Fault("commit", _poison_keys, "nan"),
    "keys become NaN and spoiled cannot be set": Fault("close", _plant_unspoilable, "nan"),
    # ---------------------------------------------------------------- calls that concern no single request
    **{
        f"{name} raises": Fault(name, raising(name), "quiet")
        for name in ("close", "poll", "usage", "blocks", "collect_block_events", "budget")
    },
    "idle_bytes raises": Fault("idle_bytes", with_property("idle_bytes", _fail), "quiet"),
    "count_visible raises": Fault("count_visible", raising("count_visible"), "own"),
    "poll ends the process": Fault("poll", raising("poll", SystemExit), "quiet"),
    "usage returns None": Fault("usage", ignoring("usage"), "quiet"),
    "usage has words": Fault("usage", ignoring("usage", _count_of_words(CacheUsage)), "quiet"),
    "usage has NaN": Fault("usage", ignoring("usage", CacheUsage(*_any([math.nan] * 7))), "quiet"),
    "blocks returns a number": Fault("blocks", ignoring("blocks", 3), "quiet"),
    "blocks has words": Fault("blocks", ignoring("blocks", _count_of_words(Blocks)), "quiet"),
    "idle_bytes is a word": Fault("idle_bytes", with_property("idle_bytes", lambda cache: "many"), "quiet"),
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
        f"count_visible is {value}": Fault("count_visible", ignoring("count_visible", value), "own")
        for value in ("all", 0.5, -1, 0, 10_000)
    },
    **{f"budget is {value}": Fault("budget", ignoring("budget", value), "quiet") for value in ("all", 0.5, -1, 10_000)},
    "budget is 1": Fault("budget", ignoring("budget", 1), "own"),
    "evict raises": Fault("evict", raising("evict"), "quiet"),
    "evict frees nothing": Fault("evict", ignoring("evict", 1), "quiet"),
    "idle_bytes promises all": Fault("idle_bytes", with_property("idle_bytes", lambda cache: 1 << 40), "none"),
    "fork raises": Fault("fork", raising("fork"), "quiet", body=TWO),
    "fork returns the same sequence": Fault("fork", replaced("fork", lambda sequence: sequence), "quiet", body=TWO),
    "fork returns a word": Fault("fork", ignoring("fork", "child"), "quiet", body=TWO),
    # ---------------------------------------------------------------- nothing happens
    "never ready": Fault("ready", ignoring("ready", False), "stalls"),
    "never reserves": Fault("reserve", ignoring("reserve", False), "stalls"),
    "never opens": Fault("open", ignoring("open", None), "stalls"),
    "never opens, with memory of its own": Fault("open", ignoring("open", None), "stalls", hook=True),
    "never reserves, with memory of its own": Fault("reserve", ignoring("reserve", False), "stalls", hook=True),
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
