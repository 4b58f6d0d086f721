"""Logits that are NaN: when they are a fault of the strategy, which then is in quarantine, and when of the model.

Only an instance with a fallback is put in quarantine for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_strategies.base import KVCache, Plan, Row
from server.engine.isolation.quarantine import FIRST_SECONDS
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fallback_driver import COUNT, heal, make_driver, quarantine
from tests.engine.isolation.planted_faults import FAULTS, select


@pytest.mark.parametrize("what", select("nan"))
def test_an_instance_with_nan_is_in_quarantine_after_three_requests(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(tiny, what)
    with caplog.at_level(logging.ERROR):
        for i in range(3):
            assert driver.core.isolation.quarantined == []
            driver.serve(f"{i}", random_prompt(25, seed=i))
    assert driver.core.isolation.quarantined == ["bad"]
    assert (
        "cache strategy 'bad' is in quarantine; 'good' serves its requests; the last fault: the logits" in caplog.text
    )
    assert sum(step.report.failures.get("bad", 0) for step in driver.steps) >= 3
    heard, _ = driver.serve("next", random_prompt(25))
    assert heard.tokens == reference.greedy(random_prompt(25), COUNT)


def test_nan_in_a_trial_begins_the_next_pause_at_once(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(tiny, "attend writes NaN")
    quarantine(driver)
    prompt = random_prompt(25)
    for trial in range(2):
        driver.now += FIRST_SECONDS * 2**trial
        heard, _ = driver.serve(f"{trial}", prompt)
        assert heard.tokens == reference.greedy(prompt, COUNT)
        assert not driver.core.isolation.usable("bad")
    heal(monkeypatch, "attend writes NaN")
    driver.now += FIRST_SECONDS * 4
    _, record = driver.serve("last", prompt)
    assert record is not None
    assert record.instance == "bad"
    assert driver.core.isolation.quarantined == []


def _break_model(driver: Driver, is_broken: Callable[[], bool]) -> None:
    forward = driver.core.model.forward

    def broken(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        return logits.fill_(torch.nan) if is_broken() else logits

    driver.core.model.forward = broken  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("tokens_before", [0, 2])
def test_nan_of_the_model_is_blamed_on_no_strategy(tiny: Path, tokens_before: int) -> None:
    """Nor if each text begins well: the fallback's texts end in the same way."""
    driver = make_driver(tiny, "usage has NaN")
    step = 0
    _break_model(driver, lambda: step >= tokens_before)
    for i in range(12):
        step = 0
        heard = driver.submit(f"{i}", random_prompt(20, seed=i), COUNT, kv_cache="good" if i % 2 == 0 else "bad")
        while driver.core.busy:
            driver.step()
            step += 1
        assert heard.failed is not None
        assert heard.failed.code == "not_a_number"
        assert len(heard.tokens) == tokens_before
    assert driver.core.isolation.quarantined == []
    assert driver.core.isolation.caches["bad"].num_open_seats == 0


def _write_nan_in_hooks(cache: KVCache) -> None:
    """Let a cache whose sequences can be forked compute its attention by hooks, and write NaN for the result."""
    plan_rows = cache.plan

    def plan(rows: Sequence[Row]) -> Plan:
        right = plan_rows(rows)
        hooked = copy(right)

        def attend(layer_idx: int, *tensors: torch.Tensor) -> None:
            cache.attend(right, layer_idx, *tensors)
            tensors[-1].fill_(torch.nan)

        hooked.kv_location = lambda layer_idx: None  # type: ignore[method-assign]
        hooked.attend = attend  # type: ignore[method-assign,assignment]
        return hooked

    cache.plan = plan  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["attend writes NaN", "usage has NaN"], ids=["own rows", "forks"])
def test_all_choices_of_a_prompt_with_nan_are_answered_and_count_as_one_fault(
    tiny: Path, reference: Reference, what: str
) -> None:
    driver = make_driver(tiny, what, max_num_batched_tokens=512)
    cache = driver.core.isolation.caches["bad"]
    if not FAULTS[what].hook:
        assert cache.contract.forkable
        _write_nan_in_hooks(cache.inner)
    prompt = random_prompt(25)
    for turn in range(3):
        assert driver.core.isolation.quarantined == []
        choices = [driver.submit(f"{turn} 0", prompt, COUNT)]
        choices += [driver.submit(f"{turn} {i}", prompt, COUNT, sibling_of=f"{turn} 0") for i in range(1, 4)]
        driver.run()
        assert all(choice.tokens == reference.greedy(prompt, COUNT) for choice in choices)
    assert driver.core.isolation.quarantined == ["bad"]
