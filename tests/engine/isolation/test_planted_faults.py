"""Faults planted in every method of a strategy, under a load of exact requests: these are answered as if alone.

The strategy at fault is named in the answers of its own requests, in the log and in the metrics; no step raises, and
nothing waits for ever.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from copy import copy
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from cache_strategies import plugins, registry
from cache_strategies.base import KVCache, Plan, Row, Seat
from kernels.ops import KVLocation
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

COUNT = 6  # tokens of each answer
ROUNDS = 3
CODES = {"strategy_failed", "strategy_quarantined", "not_a_number"}

Plant = Callable[[KVCache], None]


class Tolerant(Driver):
    """A driver that checks the bookkeeping of the strategies without faults only."""

    def check(self) -> None:
        self.core.caches["good"].check_integrity()
        self.core.caches["ring"].check_integrity()


# ---------------------------------------------------------------- faults
def returning(method: str, value: Any) -> Plant:
    """Return a fault: the method returns a value of no use; a function is called with the right result."""

    def plant(cache: KVCache) -> None:
        right = getattr(cache, method)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = right(*args, **kwargs)
            return value(found) if callable(value) else value

        setattr(cache, method, wrong)

    return plant


def raising(method: str) -> Plant:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    return lambda cache: setattr(cache, method, fail)


def ignoring(method: str, value: Any = None) -> Plant:
    """Return a fault: the method does nothing and returns a value."""
    return lambda cache: setattr(cache, method, lambda *_, **__: value)


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


def changing_plan(change: Callable[[Plan], Plan]) -> Plant:
    """Return a fault: plan() returns a changed plan."""

    def plant(cache: KVCache) -> None:
        right = cache.plan

        def wrong(rows: Any) -> Plan:
            return change(copy(right(rows)))

        cache.plan = wrong  # type: ignore[method-assign]

    return plant


def with_slots(**fields: Callable[[Any], Any]) -> Plant:
    """Return a fault: the addresses of the plan are changed."""

    def change(plan: Plan) -> Plan:
        location = plan.kv_location(0)
        assert location is not None
        changed = {name: value(getattr(location.at, name)) for name, value in fields.items()}
        where = KVLocation(location.store, dataclasses.replace(location.at, **changed), location.window)
        plan.kv_location = lambda layer: where  # type: ignore[method-assign]
        return plan

    return changing_plan(change)


def in_attend(run: Callable[[Any], None]) -> Plant:
    """Return a fault of a strategy that computes its own attention; `run` gets the plan's attend and its arguments."""

    def change(plan: Plan) -> Plan:
        attend = plan.attend
        plan.attend = lambda *args: run((attend, args))  # type: ignore[method-assign]
        return plan

    return changing_plan(change)


def _fail(_: Any) -> None:
    raise RuntimeError("planted")


def _write_half(call: Any) -> None:
    attend, args = call
    out = args[-1].clone()
    attend(*args[:-1], out)
    args[-1][:, : out.shape[1] // 2] = out[:, : out.shape[1] // 2]


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


def _no_location(plan: Plan) -> Plan:
    plan.kv_location = _fail  # type: ignore[method-assign,assignment]
    return plan


LOUD: Mapping[str, tuple[str, Plant]] = {  # faults that end requests: the method that is named, and the fault
    **{f"{name} raises": (name, raising(name)) for name in ("open", "ready", "grow", "plan", "commit", "bytes_for")},
    **{f"{name} returns None": (name, ignoring(name)) for name in ("ready", "grow", "plan", "bytes_for")},
    "open returns an object": ("open", returning("open", object())),
    "open returns a seat of -1 tokens": ("open", changing_seat("open", length=-1)),
    "open returns a seat of all tokens": ("open", changing_seat("open", length=10_000)),
    "open returns a seat without a length": ("open", changing_seat("open", length=None)),
    "open finds too many tokens": ("open", changing_seat("open", cached=9_999)),
    "open invents a miss": ("open", changing_seat("open", miss="bad luck")),
    "ready returns a word": ("ready", returning("ready", "yes")),
    "grow returns a number": ("grow", returning("grow", 1)),
    "grow lengthens the seat": ("grow", changing_seat("grow", length=lambda n: n + 1)),
    "bytes_for is negative": ("bytes_for", ignoring("bytes_for", -1)),
    "bytes_for is a fraction": ("bytes_for", ignoring("bytes_for", 1.5)),
    "plan returns a word": ("plan", returning("plan", "plan")),
    "plan has other rows": ("plan", changing_plan(_other_rows)),
    "plan has no rows": ("plan", changing_plan(lambda plan: vars(plan).update(rows=[]) or plan)),
    "kv_location raises": ("plan", changing_plan(_no_location)),
    "blocks beyond the store": ("plan", with_slots(table=lambda t: t + 1_000_000)),
    "negative blocks": ("plan", with_slots(table=lambda t: -1 - t)),
    "rows beyond the table": ("plan", with_slots(table_row=lambda t: t + 1_000)),
    "tokens beyond the table": ("plan", with_slots(start=lambda t: t + 100_000)),
    "other numbers of tokens": ("plan", with_slots(q_start=lambda t: t * 2)),
    "addresses of another type": ("plan", with_slots(start=lambda t: t.long())),
    "too few addresses": ("plan", with_slots(start=lambda t: t[:0])),
    "blocks of another size": ("plan", with_slots(block_size=lambda n: n // 2)),
    "commit advances too far": ("commit", changing_seat("commit", length=lambda n: n + 3)),
    "commit does nothing": ("commit", ignoring("commit")),
    "commit forgets the length": ("commit", changing_seat("commit", length=None)),
}
HOOKS: Mapping[str, Plant] = {
    "attend raises": in_attend(_fail),
    "attend writes nothing": in_attend(lambda call: None),
    "attend writes half of the heads": in_attend(_write_half),
}
QUIET: Mapping[str, tuple[str, Plant]] = {  # faults that end no request
    **{
        f"{name} raises": (name, raising(name))
        for name in ("retain", "close", "poll", "usage", "blocks", "collect_block_events", "idle_pages", "pinned_pages")
    },
    **{
        f"count_dropped_tokens {what}": ("count_dropped_tokens", fault)
        for what, fault in {
            "raises": raising("count_dropped_tokens"),
            "returns None": ignoring("count_dropped_tokens"),
            "returns a fraction": ignoring("count_dropped_tokens", 0.5),
            "is negative": ignoring("count_dropped_tokens", -1),
            "is positive in an exact instance": ignoring("count_dropped_tokens", 1),
        }.items()
    },
    "usage returns None": ("usage", ignoring("usage")),
    "blocks returns a number": ("blocks", ignoring("blocks", 3)),
    "idle_pages returns a word": ("idle_pages", ignoring("idle_pages", "many")),
    "poll returns a number": ("poll", ignoring("poll", 1)),
}
STALLS: Mapping[str, tuple[str, Plant]] = {  # faults by which nothing ever happens
    "never ready": ("ready", ignoring("ready", False)),
    "never grows": ("grow", ignoring("grow", False)),
    "never opens": ("open", ignoring("open", None)),
}


# ---------------------------------------------------------------- tests
@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("sieve", "tests.contract.third_party_strategy:SieveCache", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])


def run(tiny: Path, reference: Reference, kind: str, plant: Plant) -> tuple[list[Any], int]:
    """Return the errors of the requests under the strategy at fault, and the number of its faults."""
    driver = Tolerant(
        tiny,
        strategies=strategies(
            good={"kind": "paged", "block_size": 8}, ring={"kind": "sliding_window", "window": 64}, bad={"kind": kind}
        ),
        max_seq_len=96,
        max_num_batched_tokens=80,
        strategy_timeout=0.1,
    )
    guard = driver.core.isolation.caches["bad"]
    plant(guard.inner)
    guard.replace(guard.inner)  # looks up which methods the strategy has now
    faults, deadline = 0, time.monotonic() + 30
    for turn in range(ROUNDS):
        for i, name in enumerate(["good", "bad", "ring", "bad", "good"]):
            driver.submit(f"{name} {turn} {i}", random_prompt(25, seed=i), COUNT, kv_cache=name)
        while driver.core.busy and time.monotonic() < deadline:
            result = driver.core.step()
            faults += result.report.failures.get("bad", 0)
            assert not {*result.report.failures} - {"bad"}
            for event in result.events:
                driver._hear(event.message)
            driver.check()
    assert not driver.core.busy, "something waits for ever"
    for name, heard in driver.heard.items():
        instance, _, i = name.split()
        if instance != "bad":
            assert heard.failed is None, f"{name}: {heard.failed}"
            assert heard.tokens == reference.greedy(random_prompt(25, seed=int(i)), COUNT), name
    return [heard.failed for name, heard in driver.heard.items() if name.startswith("bad")], faults


@pytest.mark.parametrize("what", LOUD)
def test_a_fault_ends_only_requests_of_its_strategy(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    method, plant = LOUD[what]
    with caplog.at_level(logging.ERROR):
        errors, faults = run(tiny, reference, "contiguous", plant)
    assert faults >= ROUNDS
    assert all(error is not None and error.code in CODES for error in errors)
    assert "cache strategy 'bad'" in errors[0].message
    assert f"{method}()" in errors[0].message
    assert errors[-1].code == "strategy_quarantined"
    assert "cache strategy 'bad' is in quarantine" in caplog.text


@pytest.mark.parametrize("what", HOOKS)
def test_a_fault_in_a_hook_ends_only_requests_of_its_strategy(tiny: Path, reference: Reference, what: str) -> None:
    errors, faults = run(tiny, reference, "sieve", HOOKS[what])
    assert faults >= ROUNDS
    assert all(error is not None and error.code in CODES for error in errors)
    assert "cache strategy 'bad' failed in attend()" in errors[0].message


@pytest.mark.parametrize("write", [_write_nan, _sleep], ids=["NaN", "slow"])
def test_what_a_hook_computes_stays_with_its_strategy(tiny: Path, reference: Reference, write: Any) -> None:
    errors, _ = run(tiny, reference, "sieve", in_attend(write))
    codes = {None if error is None else error.code for error in errors}
    assert codes == ({None} if write is _sleep else {"not_a_number"})


@pytest.mark.parametrize("what", QUIET)
def test_a_fault_that_concerns_no_request_ends_none(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    method, plant = QUIET[what]
    with caplog.at_level(logging.ERROR):
        driver_errors, faults = run(tiny, reference, "contiguous", plant)
    if method in ("usage", "blocks", "pinned_pages"):  # which are called for operators only
        return
    assert faults > 0
    assert f"cache strategy 'bad' failed in {method}()" in caplog.text
    assert all(error is None or error.code in CODES for error in driver_errors)


@pytest.mark.parametrize("what", STALLS)
def test_a_strategy_that_lets_nothing_go_on_is_named_and_ended(tiny: Path, reference: Reference, what: str) -> None:
    method, plant = STALLS[what]
    errors, faults = run(tiny, reference, "contiguous", plant)
    assert faults > 0
    assert all(error is not None and error.code in CODES for error in errors)
    assert f"failed in {method}()" in errors[0].message
