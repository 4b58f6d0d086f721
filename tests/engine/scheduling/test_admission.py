"""Tests of admission: which requests start, which wait for others, and which are rejected with which message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.engine.instance_reports import read_usage
from server.engine.ipc.messages import Failed
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 8}),
    "max_seq_len": 64,
    "max_num_seqs": 8,
}
LONGEST = 8  # blocks


def of_blocks(tiny: Path, blocks: int, **settings: Any) -> Driver:
    """Return an engine with memory for `blocks` blocks of 8 tokens."""
    sized = SETTINGS | settings
    size = Driver(tiny, **sized).block_bytes()
    return Driver(tiny, **sized, kv_memory=str(blocks * size))


def refusal(driver: Driver, prompt: int, max_tokens: int, **options: Any) -> Failed:
    failed = driver.submit("refused", [5] * prompt, max_tokens, **options).failed
    assert failed is not None
    assert "refused" not in driver.waiting()
    return failed


# -------------------------------------------------------------------- refused
def test_more_than_the_context_is_refused(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    failed = refusal(driver, 60, 5)
    assert (failed.status, failed.code, failed.param) == (400, "context_length_exceeded", "prompt")
    assert "prompt (60 tokens) and max_tokens (5) add up to 65 tokens, more than max_seq_len=64" in failed.message
    assert driver.submit("fits", random_prompt(60), 4).failed is None
    driver.run()
    assert len(driver.heard["fits"].tokens) == 4


def test_more_than_the_instance_may_ever_hold_is_refused(tiny: Path) -> None:
    limited = strategies(paged={"kind": "paged", "block_size": 8}, small={"kind": "paged", "limit": "80%"})
    driver = of_blocks(tiny, 16, strategies=limited)
    size = driver.block_bytes("small")
    driver.core.memory.set_share("small", floor=0, limit=size)  # less than start-up would allow
    failed = refusal(driver, 50, 4, kv_cache="small")
    assert (failed.status, failed.code) == (400, "context_length_exceeded")
    assert f"needs {2 * size} bytes of KV memory" in failed.message
    assert f"strategy 'small' may hold {size}" in failed.message
    assert driver.submit("elsewhere", random_prompt(50), 4, kv_cache="paged").failed is None
    driver.run()


@pytest.mark.parametrize(("seats", "max_queued_requests"), [(2, 3), (1, 0), (4, 1)])
def test_the_queue_holds_what_the_settings_say_beside_who_can_have_a_seat(
    tiny: Path, seats: int, max_queued_requests: int
) -> None:
    driver = Driver(tiny, **(SETTINGS | {"max_num_seqs": seats}), max_queued_requests=max_queued_requests)
    for i in range(seats + max_queued_requests):
        assert driver.submit(str(i), random_prompt(4), 3).failed is None, i
    failed = refusal(driver, 4, 3)
    assert (failed.status, failed.code) == (429, "queue_full")
    driver.step()
    assert len(driver.waiting()) == max_queued_requests
    assert refusal(driver, 4, 3).status == 429
    driver.run()
    assert driver.submit("later", random_prompt(4), 3).failed is None
    driver.run()
    assert all(heard.ended for heard in driver.heard.values())


def test_an_unknown_instance_is_refused(tiny: Path) -> None:
    failed = refusal(Driver(tiny, **SETTINGS), 4, 3, kv_cache="pagd")
    assert (failed.status, failed.code, failed.param) == (400, "unknown_kv_cache", "kv_cache")
    assert "'pagd'; there are contiguous, paged, sliding_window" in failed.message


# -------------------------------------------------------------------- together
@pytest.mark.parametrize(("overcommit", "at_once"), [(1.0, 2), (1.5, 3), (2.0, 4), (8.0, 8)])
def test_requests_run_while_what_they_can_come_to_is_within_the_overcommit(
    tiny: Path, overcommit: float, at_once: int
) -> None:
    driver = of_blocks(tiny, 2 * LONGEST, kv_overcommit=overcommit)
    for i in range(8):
        driver.submit(str(i), random_prompt(6, seed=i), 58)
    driver.step()
    assert len(driver.running()) == at_once


def test_one_request_runs_whatever_the_overcommit(tiny: Path) -> None:
    driver = of_blocks(tiny, LONGEST, kv_overcommit=1)
    heard = driver.submit("r", random_prompt(10), 54)
    driver.run()
    assert len(heard.tokens) == 54


def test_a_long_one_is_not_starved_by_small_ones_of_another_instance(tiny: Path, reference: Reference) -> None:
    """A contiguous request needs nearly all memory; small requests keep arriving, and overtake it for a while."""
    driver = of_blocks(tiny, LONGEST + 2)
    for i in range(4):
        driver.submit(f"small {i}", random_prompt(5, seed=i), 4, kv_cache="paged")
    driver.step()
    long = driver.submit("long", random_prompt(30), 6, kv_cache="contiguous")
    arrivals, passed = 4, 0
    while not long.tokens:
        driver.submit(f"small {arrivals}", random_prompt(5, seed=arrivals), 4, kv_cache="paged")
        arrivals += 1
        if "long" in driver.waiting():
            passed = driver.request("long").passed_over
        driver.step()
        assert arrivals < 200, "starved"
    assert passed == driver.limits.max_passed_over, "it should be passed for a while, and then by nobody"
    driver.run()
    assert long.tokens == reference.greedy(random_prompt(30), 6)


def test_an_instance_without_room_does_not_hold_up_the_others(tiny: Path) -> None:
    driver = of_blocks(tiny, LONGEST + 2)
    driver.submit("first", random_prompt(9), 20, kv_cache="contiguous")
    driver.submit("second", random_prompt(9), 2, kv_cache="contiguous")
    driver.submit("third", random_prompt(9), 2, kv_cache="paged")
    driver.step()
    assert (driver.running(), driver.waiting()) == (["first", "third"], ["second"])
    driver.run()


def test_a_share_that_comes_back_serves_who_has_waited_for_it(tiny: Path) -> None:
    driver = of_blocks(tiny, LONGEST + 2)
    heard = driver.submit("r", random_prompt(20), 5, kv_cache="paged")
    driver.core.memory.set_share("paged", floor=0, limit=0)
    for _ in range(3):
        assert driver.core.step().report.rows == 0
    driver.core.memory.set_share("paged", floor=0, limit=LONGEST * driver.block_bytes())
    driver.run()
    assert heard.finish_reason == "length"


def test_rules_see_how_much_memory_is_in_use_and_idle_memory_is_not(tiny: Path) -> None:
    rules = [{"use": "contiguous", "kv_usage_above": 0.3}]
    driver = of_blocks(tiny, 2 * LONGEST, rules=rules)
    driver.submit("first", random_prompt(49), 8)
    driver.step()
    driver.submit("second", random_prompt(5), 2)
    driver.run()
    assert read_usage(driver.core.instances["paged"]).idle > 0.3 * driver.core.memory.total_bytes
    driver.submit("third", random_prompt(6), 2)
    driver.run()
    admitted = [heard.admitted for heard in driver.heard.values()]
    assert [(a.instance, a.reason) for a in admitted if a is not None] == [
        ("paged", "default"),
        ("contiguous", "rule 0"),
        ("paged", "default"),
    ]


# -------------------------------------------------------------------- priorities
def test_among_those_who_wait_a_lower_number_comes_first_then_who_came_first(tiny: Path) -> None:
    driver = Driver(tiny, **(SETTINGS | {"max_num_seqs": 1}))
    for name, priority in (("b", 1), ("d", 2), ("a", 0), ("c", 1)):
        driver.submit(name, random_prompt(4), 2, priority=priority)
    driver.run()
    ends = {name: driver.heard[name].last_step for name in driver.heard}
    assert sorted(ends, key=lambda name: ends[name] or 0) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("instance", ["contiguous", "paged", "sliding_window"])
@pytest.mark.parametrize("full", ["memory", "seats"])
def test_a_higher_priority_takes_the_place_of_the_last_lower_one(
    tiny: Path, reference: Reference, instance: str, full: str
) -> None:
    driver = of_blocks(
        tiny, 3 * LONGEST if full == "memory" else 9 * LONGEST, max_num_seqs=8 if full == "memory" else 3
    )
    for i in range(3):
        driver.submit(f"low {i}", random_prompt(58, seed=i), 5, kv_cache="contiguous", priority=5)
    driver.step()
    driver.step()
    high = driver.submit("high", random_prompt(30), 5, kv_cache=instance, priority=4)
    driver.step()
    assert high.admitted is not None, "it has to wait"
    assert driver.running() == ["high", "low 0", "low 1"]
    driver.run()
    assert high.tokens == reference.greedy(random_prompt(30), 5)
    for i in range(3):
        assert driver.heard[f"low {i}"].tokens == reference.greedy(random_prompt(58, seed=i), 5)
    assert [r.preemptions for r in driver.records if r.instance == "contiguous" and r.prompt_tokens == 58] == [0, 0, 1]
    driver.assert_nothing_leaked()


def test_equal_priorities_never_take_turns(tiny: Path) -> None:
    driver = of_blocks(tiny, LONGEST)
    driver.submit("first", random_prompt(20, seed=1), 20, kv_cache="contiguous", priority=3)
    driver.submit("second", random_prompt(20, seed=2), 20, kv_cache="paged", priority=3)
    driver.submit("third", random_prompt(20, seed=3), 20, kv_cache="sliding_window", priority=3)
    driver.run()
    assert [record.preemptions for record in driver.records] == [0, 0, 0]
    assert [record.instance for record in driver.records] == ["contiguous", "paged", "sliding_window"]


def test_nobody_gives_way_in_vain(tiny: Path) -> None:
    """A request of equal priority has the instance's only seat: preempting others would not help."""
    limited = strategies(
        paged={"kind": "paged", "block_size": 8}, contiguous={"kind": "contiguous", "limit": f"{100 * 10 // 24}%"}
    )
    driver = of_blocks(tiny, 24, strategies=limited)
    driver.submit("low", random_prompt(20), 30, kv_cache="paged", priority=9)
    driver.submit("high", random_prompt(21), 10, kv_cache="contiguous", priority=0)
    driver.step()
    driver.submit("higher", random_prompt(22), 10, kv_cache="contiguous", priority=0)
    driver.run()
    assert [record.preemptions for record in driver.records] == [0, 0, 0]


def test_urgent_requests_overtake_long_prompts(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_batched_tokens=8)
    for i in range(4):
        driver.submit(f"long {i}", random_prompt(60, seed=i), 2, priority=1)
    driver.step()
    urgent = driver.submit("urgent", random_prompt(7), 2, priority=0)
    driver.step()
    driver.step()
    assert urgent.tokens, "its prompt comes before the rest of longer ones"
    driver.run()
