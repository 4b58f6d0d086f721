"""Faults planted in every method of a strategy, under a load of exact requests: these are answered as if alone.

The strategy at fault is named in the answers of its own requests, in the log and in the metrics; no step raises, and
nothing waits for ever.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.errors import StrategyError
from config.settings import StrategySettings
from plugin_kit.strategies.trial import StrategyTrial
from plugin_kit.strategies.values import check_values
from tests.contract.harness import make_ops
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.isolation.faulty_strategies import faulty
from tests.engine.isolation.planted_faults import FAULTS, select

COUNT = 6  # tokens of each answer
ROUNDS = 3
CODES = {"strategy_failed", "strategy_quarantined", "not_a_number"}
NEVER_CALLED_HERE = {"usage", "blocks", "pinned_blocks", "evict"}  # for operators only, or for lack of memory


class Tolerant(Driver):
    """A driver that checks the bookkeeping of the strategies without faults only."""

    def check(self) -> None:
        self.core.instances["good"].check_integrity()
        self.core.instances["ring"].check_integrity()


def run(tiny: Path, reference: Reference, what: str) -> tuple[list[Any], int]:
    """Return the errors of the requests under the strategy at fault, and the number of its faults."""
    driver = Tolerant(
        tiny,
        strategies=strategies(
            good={"kind": "paged", "block_size": 8},
            ring={"kind": "sliding_window", "window": 64},
            bad=faulty(what),
        ),
        max_seq_len=96,
        max_num_batched_tokens=80,
        strategy_timeout=0.1,
    )
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


@pytest.mark.parametrize("what", select("ends", plain=True))
def test_a_fault_ends_only_requests_of_its_strategy(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        errors, faults = run(tiny, reference, what)
    assert faults >= ROUNDS
    assert all(error is not None and error.code in CODES for error in errors)
    assert f"cache strategy 'bad' failed in {FAULTS[what].method}()" in errors[0].message
    assert errors[-1].code == "strategy_quarantined"
    assert "cache strategy 'bad' is in quarantine" in caplog.text


@pytest.mark.parametrize("what", select("nan", "none", plain=True))
def test_what_a_strategy_computes_stays_with_it(tiny: Path, reference: Reference, what: str) -> None:
    errors, _ = run(tiny, reference, what)
    codes = {None if error is None else error.code for error in errors}
    assert codes == ({None} if FAULTS[what].effect == "none" else {"not_a_number"})


@pytest.mark.parametrize("what", select("own"))
def test_a_fault_that_is_not_looked_for_harms_no_other_and_is_found_by_the_kit(
    tiny: Path, reference: Reference, what: str, rng: random.Random
) -> None:
    run(tiny, reference, what)
    trial = StrategyTrial(StrategySettings(**faulty(what)), make_ops(), rng)
    with pytest.raises(Exception):  # noqa: B017 - a strategy may raise anything
        check_values(trial)


@pytest.mark.parametrize("what", select("quiet", plain=True))
def test_a_fault_that_concerns_no_request_ends_none(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = FAULTS[what].method
    with caplog.at_level(logging.ERROR):
        driver_errors, faults = run(tiny, reference, what)
    if method in NEVER_CALLED_HERE:
        return
    assert faults > 0
    assert f"cache strategy 'bad' failed in {method}()" in caplog.text
    assert all(error is None or error.code in CODES for error in driver_errors)


@pytest.mark.parametrize("what", select("stalls"))
def test_a_strategy_that_lets_nothing_go_on_is_named_and_ended(tiny: Path, reference: Reference, what: str) -> None:
    errors, faults = run(tiny, reference, what)
    assert faults > 0
    assert all(error is not None and error.code in CODES for error in errors)
    assert f"failed in {FAULTS[what].method}()" in errors[0].message


def test_a_strategy_that_cannot_be_built_anew_stays_in_quarantine_and_holds_no_memory(
    tiny: Path, reference: Reference
) -> None:
    """Half a cache must not answer for the blocks of the instance: other strategies' requests would fail."""
    driver = Tolerant(
        tiny,
        strategies=strategies(
            good={"kind": "paged", "block_size": 8},
            ring={"kind": "sliding_window", "window": 64},
            bad=faulty("open raises", fails_anew=True),
        ),
        max_seq_len=96,
    )
    isolation, prompt = driver.core.isolation, random_prompt(25)
    for i in range(3):
        driver.submit(f"bad {i}", prompt, COUNT, kv_cache="bad")
        driver.run()
    assert isolation.quarantined == ["bad"]
    with pytest.raises(StrategyError, match=r"failed in __init__\(\): SystemExit: planted"):
        isolation.end_quarantine("bad")
    assert driver.core.memory.get_held_bytes("bad") == 0
    assert isolation.quarantined == ["bad"]
    heard = driver.submit("good", prompt, COUNT, kv_cache="good")
    driver.run()
    assert heard.tokens == reference.greedy(prompt, COUNT)
