"""Waiting raises a request's priority: the lowest one is served eventually, however many others keep arriving."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.scheduling.request import Request
from tests.engine.scheduling.fake_caches import FakeCache, Memory
from tests.engine.scheduling.scheduler_driver import SchedulerDriver


def busy_engine(**limits: Any) -> tuple[SchedulerDriver, FakeCache]:
    """Return an engine with one seat, for which a request of one step arrives every second."""
    return SchedulerDriver(max_num_seqs=1, max_queued_requests=1000, **limits), FakeCache("a", Memory(1000))


def seconds_until_served(engine: SchedulerDriver, cache: FakeCache, low: Request, at_most: int) -> int | None:
    """Submit an urgent request each second, with one step per second; return when `low` has ended, or None."""
    for second in range(at_most):
        engine.submit(f"urgent {second}", cache, 1, 1, priority=0, arrived=float(second))
        engine.step()
        if low.finish_reason is not None:
            return second
    return None


@pytest.mark.parametrize(
    ("priority", "aging", "longest", "due"), [(9, 2.0, 600.0, 18), (9, 2.0, 5.0, 5), (1, 7.0, 600.0, 7)]
)
def test_a_low_priority_waits_for_those_that_come_within_its_delay(
    priority: int, aging: float, longest: float, due: int
) -> None:
    engine, cache = busy_engine(priority_aging=aging, max_priority_wait=longest)
    low = engine.submit("low", cache, 1, 1, priority=priority, arrived=0.0)
    assert seconds_until_served(engine, cache, low, at_most=100) in (due, due + 1)


def test_without_aging_it_would_wait_for_ever() -> None:
    engine, cache = busy_engine(priority_aging=1e6, max_priority_wait=1e6)
    low = engine.submit("low", cache, 1, 1, priority=9, arrived=0.0)
    assert seconds_until_served(engine, cache, low, at_most=300) is None


def test_the_lowest_priority_there_is_waits_no_longer_than_the_bound() -> None:
    engine, cache = busy_engine(max_priority_wait=50.0)
    low = engine.submit("low", cache, 1, 1, priority=2**31 - 1, arrived=0.0)
    assert seconds_until_served(engine, cache, low, at_most=100) in (50, 51)


def test_a_request_that_has_waited_is_not_preempted_by_those_it_overtook() -> None:
    engine, cache = busy_engine(priority_aging=2.0)
    low = engine.submit("low", cache, 1, 10, priority=5, arrived=0.0)
    assert seconds_until_served(engine, cache, low, at_most=100) in (19, 20)  # 10 s of waiting, 10 tokens
    assert low.num_preemptions == 0


def test_a_fresh_request_is_preempted_by_a_more_urgent_one() -> None:
    engine, cache = busy_engine(priority_aging=2.0)
    low = engine.submit("low", cache, 1, 10, priority=5, arrived=0.0)
    engine.step()
    engine.submit("urgent", cache, 1, 1, priority=0, arrived=1.0)
    engine.step()
    assert low.num_preemptions == 1


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(0, 30)), min_size=2, max_size=40))
def test_the_order_of_any_two_never_changes(requests: list[tuple[int, float]]) -> None:
    """So the queue needs no sorting as time passes; compared with ranks computed at several times."""
    engine, cache = busy_engine(priority_aging=3.0, max_priority_wait=1e9)
    for i, (priority, arrived) in enumerate(requests):
        engine.submit(str(i), cache, 1, 1, priority=priority, arrived=arrived)
    waiting = engine.scheduler.waiting
    for now in (30.0, 100.0, 1000.0):
        levels = [r.priority - (now - r.times.arrived) / 3.0 for r in waiting]
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(levels))
