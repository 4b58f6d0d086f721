"""A cancelled request has ended when the call returns: its memory is free, and other requests are unaffected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.engine.ipc.messages import SamplingParams, Submit
from tests.engine.engine_driver import WORKER, Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

INSTANCES = ["paged", "contiguous", "sliding_window", "mirrored"]
SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 8}, mirrored={"kind": "mirrored"}),
    "max_seq_len": 128,
    "max_num_batched_tokens": 16,
}
PROMPT = random_prompt(60)


def test_of_every_state_all_memory_comes_back_at_once(tiny: Path) -> None:
    for instance in INSTANCES:
        for steps in (0, 1, 2, 4, 7):  # waiting, three times half-way through the prompt, decoding
            driver = Driver(tiny, **SETTINGS)
            before = driver.free_bytes
            heard = driver.submit("r", PROMPT, 20, kv_cache=instance)
            for _ in range(steps):
                driver.step()
            assert bool(heard.tokens) == (steps >= 4)
            assert steps == 0 or driver.free_bytes < before
            driver.cancel("r")
            assert driver.free_bytes == before, (instance, steps)
            driver.assert_nothing_leaked()


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("steps", [1, 9])
def test_neighbours_are_not_affected(tiny: Path, reference: Reference, instance: str, steps: int) -> None:
    driver = Driver(tiny, **SETTINGS)
    names = {name: random_prompt(20, seed=i) for i, name in enumerate([*INSTANCES, "gone"])}
    for name, prompt in names.items():
        driver.submit(name, prompt, 12, kv_cache=instance if name == "gone" else name)
    for _ in range(steps):
        driver.step()
    driver.cancel("gone")
    said = list(driver.heard["gone"].tokens)
    driver.run()
    for name in INSTANCES:
        assert driver.heard[name].tokens == reference.greedy(names[name], 12)
    assert driver.heard["gone"].tokens == said, "something was said after the cancellation"
    driver.assert_nothing_leaked()


def test_it_leaves_a_record_in_the_next_step(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("begun", PROMPT, 20)
    driver.step()
    driver.submit("waiting", PROMPT, 20)
    driver.cancel("begun")
    driver.cancel("waiting")
    records = driver.step().finished
    assert [(r.outcome, r.generated_tokens, r.kv_bytes > 0) for r in records] == [
        ("cancelled", 0, True),
        ("cancelled", 0, False),
    ]
    assert [r.queue_seconds is None for r in records] == [False, True]
    assert not driver.step().finished, "told once"


def test_one_that_came_to_a_stop_string_has_stopped(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    heard = driver.submit("r", random_prompt(9), 20)
    driver.step()
    driver.step()
    driver.cancel("r", "stop")
    (record,) = driver.step().finished
    assert (record.outcome, record.generated_tokens) == ("stop", 2)
    assert len(heard.tokens) == 2
    driver.assert_nothing_leaked()


def test_unknown_and_ended_requests_are_no_error(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.cancel("never heard of")
    driver.submit("r", PROMPT, 1)
    driver.run()
    driver.cancel("r")
    driver.cancel("r")
    assert len(driver.records) == 1
    driver.core.cancel_worker(77)


def test_who_was_preempted_can_be_cancelled(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_seqs=1)
    driver.submit("low", PROMPT, 20, priority=1)
    for _ in range(6):
        driver.step()
    driver.submit("high", PROMPT[:5], 3, priority=0)
    driver.step()
    assert driver.request("low").num_preemptions == 1
    driver.cancel("low")
    driver.run()
    assert driver.heard["high"].finish_reason == "length"
    driver.assert_nothing_leaked()


def test_a_worker_that_is_gone_takes_its_requests_along_and_no_others(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_seqs=3)
    for i in range(4):  # ids of another worker, the same as ours
        theirs = Submit(str(i), PROMPT, SamplingParams(20, temperature=0.0, ignore_eos=True), kv_cache=INSTANCES[i % 4])
        assert driver.core.submit(WORKER + 1, theirs) is None
    ours = driver.submit("3", random_prompt(10), 5)
    for _ in range(3):
        driver.core.step()
    driver.core.cancel_worker(WORKER + 1)
    driver.check()
    assert [r.key for r in (*driver.core.scheduler.running, *driver.core.scheduler.waiting)] == [(WORKER, "3")]
    driver.run()
    assert ours.tokens == reference.greedy(random_prompt(10), 5)
    driver.assert_nothing_leaked()
