"""Tests of a request's cache options, of what it found in the cache, and of the records and metrics of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache_strategies.cache_driver import find_cached
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

PROMPT = random_prompt(40)
BLOCKS = strategies(paged={"kind": "paged", "block_size": 4})
COUNT = 5


def driver_of(tiny: Path, **settings: object) -> Driver:
    return Driver(tiny, **({"strategies": BLOCKS, "max_seq_len": 64} | settings))


def computed(driver: Driver) -> int:
    return sum(step.report.tokens for step in driver.steps)


def after_another(driver: Driver, instance: str = "paged", **options: object) -> int:
    """Run the same prompt twice, so that the second request finds the first one's tokens."""
    driver.submit("first", PROMPT, COUNT, kv_cache=instance)
    driver.run()
    before = computed(driver)
    driver.submit("second", PROMPT, COUNT, kv_cache=instance, explain=True, **options)
    driver.run()
    assert driver.heard["first"].tokens == driver.heard["second"].tokens
    driver.assert_nothing_leaked()
    return computed(driver) - before


@pytest.mark.parametrize(
    ("instance", "options", "cached", "miss"),
    [
        ("paged", {}, 36, None),
        ("paged", {"tenant": "you"}, 0, "cold"),
        ("paged", {"cache_salt": "mine"}, 0, "salt"),
        ("paged", {"max_cached": 0}, 0, "bypass"),
        ("paged", {"max_cached": 18}, 16, "bypass"),
        ("contiguous", {}, 39, None),
        ("contiguous", {"tenant": "you"}, 0, "cold"),
        ("contiguous", {"max_cached": 30}, 30, "bypass"),
        ("sliding_window", {}, 0, "window"),
    ],
)
def test_a_prompt_that_comes_again(
    tiny: Path, reference: Reference, instance: str, options: dict[str, object], cached: int, miss: str | None
) -> None:
    driver = driver_of(tiny)
    assert after_another(driver, instance, **options) == len(PROMPT) - cached + COUNT - 1
    told = driver.heard["second"].explained
    assert told is not None
    assert (told.record.cached_tokens, told.record.miss, told.record.outcome) == (cached, miss, "length")
    assert told.record == driver.records[-1], "what is told is what is counted"
    if instance != "sliding_window":
        assert driver.heard["second"].tokens == reference.greedy(PROMPT, COUNT)


def test_two_tenants_with_the_same_prompt_share_nothing(tiny: Path) -> None:
    driver = driver_of(tiny)
    for name, tenant in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "two")):
        driver.submit(name, PROMPT, COUNT, tenant=tenant)
    driver.run()
    cached = {name: heard.admitted.cached_tokens for name, heard in driver.heard.items() if heard.admitted}
    assert cached == {"a": 0, "b": 0, "c": 36, "d": 36}


def test_hits_survive_preemption_and_count_once(tiny: Path, reference: Reference) -> None:
    driver = driver_of(tiny)
    driver.submit("it", PROMPT, 12, explain=True)
    for _ in range(3):
        driver.step()
    driver.preempt("it")
    before = computed(driver)
    driver.run()
    assert driver.heard["it"].tokens == reference.greedy(PROMPT, 12)
    assert computed(driver) - before < len(PROMPT), "its blocks were there still"
    told = driver.heard["it"].explained
    assert told is not None
    assert (told.record.cached_tokens, told.record.miss, told.record.preemptions) == (0, "cold", 1)


@pytest.mark.parametrize(
    ("instance", "dropped", "budget"),
    [("paged", 0, None), ("contiguous", 0, None), ("ring", 44 - 7 - 2, 7 + 2), ("wide", 0, 44)],
)
def test_a_record_says_how_many_tokens_were_kept_and_dropped(
    tiny: Path, instance: str, dropped: int, budget: int | None
) -> None:
    """The last of 45 tokens does not enter the cache; of the others, the next token sees 7 in the window, and sinks."""
    rings = {
        "ring": {"kind": "sliding_window", "window": 8, "sinks": 2},
        "wide": {"kind": "sliding_window", "window": 42, "sinks": 3},
    }
    driver = driver_of(tiny, strategies=BLOCKS | strategies(**rings))
    assert all(spec.window is None for spec in driver.core.model.layer_specs)
    told = driver.submit("it", PROMPT, COUNT, kv_cache=instance, explain=True)
    driver.run()
    assert told.explained is not None
    record = told.explained.record
    assert (record.kept_tokens, record.dropped_tokens) == (44 - dropped, dropped)
    assert (record.budget_tokens, record.compactions, record.compaction_seconds) == (budget, 0, 0)


@pytest.mark.parametrize("outcome", ["cancelled", "stop"])
def test_a_request_without_a_seat_has_no_tokens(tiny: Path, outcome: str) -> None:
    driver = driver_of(tiny)
    driver.submit("it", PROMPT, 12)
    driver.step()
    driver.preempt("it")
    driver.cancel("it", outcome)
    driver.step()
    assert [(record.kept_tokens, record.dropped_tokens) for record in driver.records] == [(0, 0)]


def test_who_did_not_ask_is_told_nothing(tiny: Path) -> None:
    driver = driver_of(tiny)
    driver.submit("it", PROMPT, COUNT)
    driver.run()
    assert driver.heard["it"].explained is None


@pytest.mark.parametrize(("outcome", "told"), [("stop", True), ("cancelled", False)])
def test_one_that_is_stopped_is_explained_and_one_that_is_cancelled_is_not(
    tiny: Path, outcome: str, told: bool
) -> None:
    driver = driver_of(tiny)
    heard = driver.submit("it", PROMPT, 20, explain=True)
    for _ in range(3):
        driver.step()
    driver.cancel("it", outcome)
    driver.step()
    assert (heard.explained is not None) == told
    if heard.explained is not None:
        assert (heard.explained.record.outcome, heard.explained.record.generated_tokens) == ("stop", 3)


def test_what_is_worth_more_stays_longer(tiny: Path) -> None:
    size = driver_of(tiny).block_bytes()
    driver = driver_of(tiny, kv_memory=str(20 * size))
    precious, cheap, large = (random_prompt(n, seed=n) for n in (17, 18, 44))
    driver.submit("precious", precious, 1, kv_cache="paged", kept=5)
    driver.run()
    driver.submit("cheap", cheap, 1, kv_cache="paged")
    driver.run()
    driver.submit("large", large, 12, kv_cache="paged")
    driver.run()
    cache = driver.core.instances["paged"]
    assert (find_cached(cache, precious), find_cached(cache, cheap) < 16) == (16, True)
    evicted = sum(step.report.evicted_bytes.get("paged", 0) for step in driver.steps)
    assert evicted == driver.core.memory.get_evicted_bytes("paged") > 0
