"""The choices (n > 1) of a prompt: it is computed once, and each choice continues as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.engine.info import read_engine_state
from server.engine.ipc.messages import SamplingParams
from tests.engine.engine_driver import Driver, least_memory, strategies
from tests.engine.expected_tokens import Reference, random_prompt

PROMPT = random_prompt(22)
COUNT, CHOICES = 9, 4
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        window={"kind": "sliding_window", "window": 16, "sinks": 2},
        mirrored={"kind": "mirrored"},
    ),
    "max_seq_len": 64,
    "max_num_batched_tokens": 12,
}
INSTANCES = ["paged", "contiguous", "window", "mirrored"]


def choices(driver: Driver, instance: str = "paged", count: int = CHOICES, **options: object) -> None:
    """Submit sampled choices of one prompt, each with its own seed."""
    for i in range(count):
        ours: dict[str, Any] = {"temperature": 0.9, "top_k": 10, "seed": i, "sibling_of": "0" if i else None}
        driver.submit(str(i), PROMPT, COUNT, kv_cache=instance, **(ours | options))


def assert_right(driver: Driver, reference: Reference, but: tuple[int, ...] = (), count: int = CHOICES) -> None:
    for i in set(range(count)) - set(but):
        sampling = SamplingParams(COUNT, 0.9, top_k=10, seed=i, ignore_eos=True)
        assert driver.heard[str(i)].tokens == reference.sampled(PROMPT, sampling), i
    driver.assert_nothing_leaked()


def computed(driver: Driver) -> int:
    return sum(step.report.tokens for step in driver.steps)


def test_siblings_wait_for_the_prompt_of_the_first(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    choices(driver)
    driver.step()
    assert read_engine_state(driver.engine, {}).waiting == {("paged", "sibling"): CHOICES - 1}


def forked(driver: Driver) -> int:
    return sum(sum(step.report.forks.values()) for step in driver.steps)


@pytest.mark.parametrize("instance", INSTANCES)
def test_the_prompt_is_computed_once(tiny: Path, reference: Reference, instance: str) -> None:
    driver = Driver(tiny, **SETTINGS)
    choices(driver, instance)
    driver.run()
    if instance != "window":
        assert_right(driver, reference)
    assert computed(driver) == len(PROMPT) + CHOICES * (COUNT - 1)
    assert forked(driver) == CHOICES - 1
    cached = [heard.admitted.cached_tokens for heard in driver.heard.values() if heard.admitted]
    assert cached == [0] + [len(PROMPT)] * (CHOICES - 1)
    assert sum(record.forked for record in driver.records) == CHOICES - 1


def test_under_a_window_too_each_is_as_if_alone(tiny: Path) -> None:
    together, alone = Driver(tiny, **SETTINGS), Driver(tiny, **SETTINGS)
    choices(together, "window")
    choices(alone, "window", sibling_of=None)
    together.run(), alone.run()
    assert forked(alone) == 0
    assert [h.tokens for h in together.heard.values()] == [h.tokens for h in alone.heard.values()]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_when_the_first_is_cancelled_the_next_takes_its_place(tiny: Path, reference: Reference, steps: int) -> None:
    driver = Driver(tiny, **SETTINGS)
    choices(driver)
    for _ in range(steps):
        driver.step()
    driver.cancel("0")
    driver.run()
    assert_right(driver, reference, but=(0,))
    assert forked(driver) == CHOICES - 1 - (steps < 2), "the prompt takes two steps"


@pytest.mark.parametrize("instance", ["paged", "contiguous"])
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_with_fewer_seats_the_rest_waits_for_its_own(
    tiny: Path, reference: Reference, instance: str, seats: int
) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_seqs=seats)
    choices(driver, instance)
    driver.run()
    assert_right(driver, reference)


@pytest.mark.parametrize("overcommit", [1, 20])
def test_in_tiny_memory_nobody_waits_for_ever(tiny: Path, reference: Reference, overcommit: float) -> None:
    sized = SETTINGS | {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "kv_overcommit": overcommit}
    driver = Driver(tiny, **sized, kv_memory=str(least_memory(tiny, **sized)))
    choices(driver)
    driver.run()
    assert_right(driver, reference)


def test_a_choice_that_comes_late_or_differs_looks_in_the_cache(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("0", PROMPT, COUNT, kv_cache="paged", temperature=0.9, top_k=10, seed=0)
    for _ in range(3):
        driver.step()
    driver.submit("1", PROMPT, COUNT, kv_cache="paged", temperature=0.9, top_k=10, seed=1, sibling_of="0")
    driver.submit("other prompt", PROMPT[:-1], 2, kv_cache="paged", sibling_of="0")
    driver.submit("other cache", PROMPT, 2, kv_cache="contiguous", sibling_of="0")
    driver.submit("other salt", PROMPT, 2, kv_cache="paged", tenant="you", sibling_of="0")
    driver.submit("of nobody", PROMPT, 2, kv_cache="paged", sibling_of="gone")
    driver.run()
    assert forked(driver) == 0
    assert_right(driver, reference, count=2)
    cached = {name: heard.admitted.cached_tokens for name, heard in driver.heard.items() if heard.admitted}
    assert cached == {"0": 0, "1": 20, "other prompt": 20, "other cache": 0, "other salt": 0, "of nobody": 20}


def test_different_ends_and_explanations(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    for i, most in enumerate((1, 5, 1)):
        driver.submit(str(i), PROMPT, most, kv_cache="paged", sibling_of="0" if i else None, explain=True)
    driver.run()
    assert [len(heard.tokens) for heard in driver.heard.values()] == [1, 5, 1]
    records = [heard.explained.record for heard in driver.heard.values() if heard.explained]
    assert [(r.cached_tokens, r.forked, r.miss) for r in records] == [(0, False, "cold"), *[(22, True, None)] * 2]
    driver.assert_nothing_leaked()


def test_a_choice_that_is_refused_is_not_waited_for(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_seqs=2, max_queued_requests=1)
    choices(driver)
    refused = driver.heard["3"].failed
    assert refused is not None
    assert refused.status == 429
    driver.run()
    assert_right(driver, reference, but=(3,))


def test_choices_that_only_compute_the_prompt_generate_nothing(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    first = driver.submit("first", random_prompt(20), 0)
    other = driver.submit("other", random_prompt(20), 0, sibling_of="first")
    driver.run()
    assert first.ended
    assert other.ended
    assert forked(driver) == 1
    assert not any(step.report.generated_tokens for step in driver.steps)
