"""Requests with a common prefix compute it once, and the one that computes it may end at any time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

BLOCK = 4
COMMON = random_prompt(40, seed=3)
TAILS = [random_prompt(n, seed=4) for n in (1, 2, 3, 5, 6)]
COUNT = 6
SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": BLOCK}),
    "max_seq_len": 64,
    "max_num_batched_tokens": 12,
}


def prompt(i: int) -> list[int]:
    return COMMON + TAILS[i]


def together(tiny: Path, **settings: Any) -> Driver:
    """Submit five requests with a common prefix at once."""
    driver = Driver(tiny, **(SETTINGS | settings))
    for i in range(len(TAILS)):
        driver.submit(str(i), prompt(i), COUNT, kv_cache="paged", priority=1)
    return driver


def assert_right(driver: Driver, reference: Reference, but: int = -1) -> None:
    """Assert that all other requests were answered as if alone."""
    for i in range(len(TAILS)):
        if i != but:
            assert driver.heard[str(i)].tokens == reference.greedy(prompt(i), COUNT), i
            assert driver.heard[str(i)].finish_reason == "length"
    driver.assert_nothing_leaked()


def computed(driver: Driver) -> int:
    return sum(step.report.tokens for step in driver.steps)


def test_a_common_beginning_is_computed_once(tiny: Path, reference: Reference) -> None:
    driver = together(tiny)
    driver.run()
    assert_right(driver, reference)
    assert computed(driver) == len(COMMON) + sum(len(tail) + COUNT - 1 for tail in TAILS)
    admitted = [driver.heard[str(i)].admitted for i in range(len(TAILS))]
    assert [a.cached_tokens for a in admitted if a is not None] == [0] + [len(COMMON)] * 4


@pytest.mark.parametrize("blocks", [16, 17, 20])
def test_it_is_shared_in_tiny_memory_too(tiny: Path, reference: Reference, blocks: int) -> None:
    size = Driver(tiny, **SETTINGS).block_bytes()
    driver = together(tiny, kv_memory=str(blocks * size), kv_overcommit=20)
    driver.run()
    assert_right(driver, reference)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_when_the_owner_is_cancelled_the_next_goes_on_where_it_stood(
    tiny: Path, reference: Reference, steps: int
) -> None:
    driver = together(tiny)
    for _ in range(steps):
        driver.step()
    assert computed(driver) == 12 * steps
    driver.cancel("0")
    driver.run()
    assert_right(driver, reference, but=0)
    lost = 12 * steps % BLOCK
    assert lost == 0, "steps end at a block"
    assert computed(driver) == len(COMMON) + sum(len(tail) + COUNT - 1 for tail in TAILS[1:])


def test_every_owner_in_turn_is_cancelled(tiny: Path, reference: Reference) -> None:
    driver = together(tiny, max_num_batched_tokens=5)
    for name in ("0", "1", "2", "3"):
        driver.step()
        driver.cancel(name)
    driver.run()
    assert driver.heard["4"].tokens == reference.greedy(prompt(4), COUNT)
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_when_the_owner_is_preempted_it_waits_for_its_heir(tiny: Path, reference: Reference, steps: int) -> None:
    """A request of higher priority takes all seats but one, and nearly all memory."""
    size = Driver(tiny, **SETTINGS).block_bytes()
    driver = together(tiny, kv_memory=str(24 * size), kv_overcommit=20)
    for _ in range(steps):
        driver.step()
    urgent = driver.submit("urgent", random_prompt(50, seed=7), 10, kv_cache="paged", priority=0)
    driver.run()
    assert urgent.tokens == reference.greedy(random_prompt(50, seed=7), 10)
    assert any(step.report.preemptions for step in driver.steps)
    assert_right(driver, reference)


def test_a_waiting_request_of_higher_priority_does_not_block_the_owner(tiny: Path, reference: Reference) -> None:
    driver = together(tiny)
    driver.step()
    driver.submit("urgent", prompt(0), COUNT, kv_cache="paged", priority=-5)
    driver.run()
    assert driver.heard["urgent"].tokens == reference.greedy(prompt(0), COUNT)
    assert_right(driver, reference)


def test_when_the_owner_fails_those_who_wait_inherit(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = together(tiny)
    cache = driver.core.instances["paged"]
    locate: Callable[..., Any] = cache.locate
    driver.step()

    def broken(rows: Any, lengths: Any) -> Any:
        raise ValueError("out of luck")

    monkeypatch.setattr(cache, "locate", broken)
    driver.step()
    monkeypatch.setattr(cache, "locate", locate)
    assert driver.heard["0"].failed is not None
    driver.run()
    assert_right(driver, reference, but=0)


def test_conversations_find_what_was_said_before(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    text = COMMON[:10]
    for turn in range(3):
        heard = driver.submit(str(turn), text, 7, kv_cache="paged")
        driver.run()
        assert heard.tokens == reference.greedy(text, 7)
        assert heard.admitted is not None
        assert heard.admitted.cached_tokens == (0 if turn == 0 else (len(text) - 4) // BLOCK * BLOCK)
        text = text + heard.tokens + random_prompt(3, seed=turn)
    driver.assert_nothing_leaked()
