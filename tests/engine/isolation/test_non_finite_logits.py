"""Logits that are NaN: a fallback answers in place of the strategy, whose quarantine they never begin.

They may be the model's fault as well: what tells them apart is the strategies' kit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engine_driver import Driver, compute_by_hooks
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fallback_driver import COUNT, make_driver
from tests.engine.isolation.planted_faults import FAULTS, select


@pytest.mark.parametrize("what", select("nan"))
def test_every_request_with_nan_is_answered_by_the_fallback(tiny: Path, reference: Reference, what: str) -> None:
    driver = make_driver(tiny, what)
    for i in range(5):
        prompt = random_prompt(25, seed=i)
        heard, record = driver.serve(f"{i}", prompt)
        if heard.failed is not None:  # its first tokens were sent
            assert heard.failed.code == "not_a_number"
            continue
        assert heard.tokens == reference.greedy(prompt, COUNT)
        assert record is not None
        assert (record.instance, record.fallback_of) == ("good", "bad")
    assert what != "attend writes NaN" or all(heard.failed is None for heard in driver.heard.values())
    assert driver.core.isolation.quarantined == []


def _break_model(driver: Driver, is_broken: Callable[[], bool]) -> None:
    forward = driver.core.model.forward

    def broken(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        return logits.fill_(torch.nan) if is_broken() else logits

    driver.core.model.forward = broken  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("tokens_before", [0, 2])
def test_nan_of_the_model_ends_requests_with_an_error(tiny: Path, tokens_before: int) -> None:
    """Also if each text begins well: the fallback's texts end in the same way."""
    driver = make_driver(tiny, "usage has NaN")
    step = 0
    _break_model(driver, lambda: step >= tokens_before)
    for i in range(4):
        step = 0
        heard = driver.submit(f"{i}", random_prompt(20, seed=i), COUNT, kv_cache="good" if i % 2 == 0 else "bad")
        while driver.core.busy:
            driver.step()
            step += 1
        assert heard.failed is not None
        assert heard.failed.code == "not_a_number"
        assert len(heard.tokens) == tokens_before
    assert driver.core.isolation.quarantined == []
    assert driver.core.instances["bad"].num_open == 0


def _write_nan(layer: int, run: Callable[[], None], out: torch.Tensor) -> None:
    """Compute attention, and write NaN for the result."""
    run()
    out.fill_(torch.nan)


@pytest.mark.parametrize("what", ["attend writes NaN", "usage has NaN"], ids=["own rows", "forks"])
def test_all_choices_of_a_prompt_with_nan_are_answered(tiny: Path, reference: Reference, what: str) -> None:
    driver = make_driver(tiny, what, max_num_batched_tokens=512)
    cache = driver.core.instances["bad"]
    if not FAULTS[what].hook:
        compute_by_hooks(cache.strategy, _write_nan)
    prompt = random_prompt(25)
    choices = [driver.submit("0", prompt, COUNT)]
    choices += [driver.submit(f"{i}", prompt, COUNT, sibling_of="0") for i in range(1, 4)]
    driver.run()
    assert all(choice.tokens == reference.greedy(prompt, COUNT) for choice in choices)
