"""A request that has waited for long, for memory that others held, is no fault of its strategy once they free it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from server.engine.isolation.progress import MIN_STEPS
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import random_prompt

LONG = MIN_STEPS + 60  # tokens of an answer that takes more steps than a request may wait for nothing
TIMEOUT = 0.1
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        holder={"kind": "contiguous", "prefix_cache": False}, ring={"kind": "sliding_window", "window": LONG}
    ),
    "max_seq_len": LONG + 60,
    "strategy_timeout": TIMEOUT,
    "kv_overcommit": 100.0,
}


@pytest.fixture
def driver(tiny: Path) -> Driver:
    """Return an engine with memory for one sequence."""
    return Driver(tiny, **SETTINGS, kv_memory=str(least_memory(tiny, **SETTINGS)))


def test_memory_that_a_step_frees_is_offered_before_a_strategy_is_blamed(driver: Driver) -> None:
    driver.submit("first", random_prompt(10, seed=1), LONG, kv_cache="holder")
    driver.step()
    waiting = driver.submit("second", random_prompt(10, seed=2), 3, kv_cache="ring")
    driver.step()
    assert driver.waiting() == ["second"]
    time.sleep(TIMEOUT)  # whatever the steps take
    driver.run()
    assert waiting.failed is None
    assert len(waiting.tokens) == 3
    assert not any(step.report.failures for step in driver.steps)
    driver.assert_nothing_leaked()


def test_memory_that_others_free_unnoticed_is_no_fault_of_a_strategy_that_was_refused_before(tiny: Path) -> None:
    """As when another strategy evicts more than it takes: no sequence has ended."""
    least = least_memory(tiny, **SETTINGS)
    driver = Driver(tiny, **SETTINGS, kv_memory=str(2 * least))
    memory = driver.core.memory
    driver.submit("first", random_prompt(10, seed=1), LONG, kv_cache="holder")
    driver.step()
    region = memory.add_instance("another").region(64)
    blocks = region.allocate(memory.free_bytes // 64)
    assert blocks is not None
    waiting = driver.submit("second", random_prompt(10, seed=2), 3, kv_cache="ring")
    driver.step()
    assert driver.waiting() == ["second"]
    time.sleep(TIMEOUT)
    for _ in range(MIN_STEPS + 5):
        driver.step()
    region.release(blocks)
    driver.run()
    assert waiting.failed is None
    assert len(waiting.tokens) == 3
    assert not any(step.report.failures for step in driver.steps)


def test_a_request_that_the_limits_hold_up_is_no_longer_refused_by_its_strategy(driver: Driver) -> None:
    scheduler = driver.core.scheduler
    driver.submit("first", random_prompt(10, seed=1), LONG, kv_cache="holder")
    driver.step()
    waiting = driver.submit("second", random_prompt(10, seed=2), 3, kv_cache="ring")
    driver.step()
    assert driver.request("second") in scheduler.list_held_up()
    scheduler.limits = scheduler.limits._replace(max_num_seqs=1)
    scheduler.mark_room_changed()
    driver.step()
    assert driver.waiting() == ["second"]
    assert driver.request("second") not in scheduler.list_held_up()
    driver.run()
    assert len(waiting.tokens) == 3


def test_a_request_that_only_lacks_budget_is_no_fault_of_its_strategy(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS, kv_memory="16MiB", max_num_batched_tokens=1)
    waiting = driver.submit("waiting", random_prompt(LONG - 10, seed=1), 2, kv_cache="ring", priority=1)
    for _ in range(3):
        driver.step()
    driver.submit("first", random_prompt(LONG, seed=2), 2, kv_cache="holder")  # takes the budget of all its steps
    driver.step()
    time.sleep(TIMEOUT)
    driver.run()
    assert waiting.failed is None
    assert not any(step.report.failures for step in driver.steps)
