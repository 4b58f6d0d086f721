"""Fallbacks: another instance serves the requests of one at fault, with the right texts, until that comes back.

Faults are those of tests/engine/isolation; expected texts are computed without a cache.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_strategies.base import KVCache, Plan, Row
from server.engine.core import StepResult
from server.engine.isolation.quarantine import FIRST_SECONDS
from server.records import RequestRecord
from tests.engine.engine_driver import Driver, RequestEvents, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.isolation import faulty_strategies
from tests.engine.isolation.planted_faults import FAULTS, select

COUNT = 6  # tokens of each answer
FAULTY = f"{faulty_strategies.__name__}:FaultyCache"
FAULTY_HOOK = f"{faulty_strategies.__name__}:FaultyHookCache"
STRATEGY_CODES = {"strategy_failed", "strategy_quarantined"}


class FallbackDriver(Driver):
    """A driver of an engine with instances whose names begin with "bad", which are not checked, and a clock."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        defaults = {"max_seq_len": 96, "max_num_batched_tokens": 80, "strategy_timeout": 0.1}
        super().__init__(directory, **(defaults | settings))
        self.now = 1000.0
        self.core.isolation._quarantine._clock = lambda: self.now

    def check(self) -> None:
        for name, cache in self.core.caches.items():
            if not name.startswith("bad"):
                cache.check_integrity()
        for request in self.requests:
            assert request in request.siblings
            assert {sibling.cache for sibling in request.siblings} == {request.cache}

    def serve(self, name: str, prompt: list[int], **options: Any) -> tuple[RequestEvents, RequestRecord | None]:
        """Run a request alone, and return its events and its record; None: it was refused."""
        before = len(self.records)
        heard = self.submit(name, prompt, COUNT, **options)
        self.run()
        return heard, self.records[-1] if len(self.records) > before else None

    def run(self, at_most: int = 2000) -> None:
        deadline = time.monotonic() + 30
        while self.core.busy:
            assert time.monotonic() < deadline, "something waits for ever"
            self.step()

    def step(self) -> StepResult:
        """Run a step, which need not compute anything if a strategy lets nothing go on."""
        result = self.core.step()
        self.steps.append(result)
        for event in result.events:
            self._hear(event.message)
        self.check()
        return result


def faulty(what: str, **options: Any) -> dict[str, Any]:
    """Return the settings of an instance with a fault."""
    return {"kind": FAULTY_HOOK if FAULTS[what].hook else FAULTY, "fault": what, **options}


def make_driver(tiny: Path, what: str, **settings: Any) -> FallbackDriver:
    """Return an engine whose default instance has a fault and a fallback."""
    instances = strategies(bad=faulty(what, fallback="good"), good={"kind": "paged", "block_size": 8})
    return FallbackDriver(tiny, **({"strategies": instances, "default_strategy": "bad"} | settings))


def heal(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Let the instances that are built from now on have the fault no more."""
    monkeypatch.setitem(FAULTS, what, replace(FAULTS[what], plant=lambda cache: None))


def quarantine(driver: FallbackDriver, count: int = 3) -> None:
    """Let requests meet the fault of "bad" until it is in quarantine."""
    for i in range(count):
        driver.serve(f"before {i}", random_prompt(20, seed=100 + i), kv_cache="bad")
    assert driver.core.isolation.quarantined == ["bad"]


# ---------------------------------------------------------------- faults and quarantine
@pytest.mark.parametrize("what", select("ends", "stalls", "nan", plain=True))
def test_clients_of_an_instance_at_fault_get_the_answers_of_its_fallback(
    tiny: Path, reference: Reference, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a request that has been admitted before the fault may end with an error."""
    driver = make_driver(tiny, what)
    for turn in range(4):
        for i in range(2):
            driver.submit(f"{turn} {i}", random_prompt(25, seed=i), COUNT)
        driver.run()
    assert driver.core.isolation.quarantined == ["bad"]
    for name, heard in driver.heard.items():
        if heard.failed is not None:
            assert heard.admitted is not None
            assert heard.admitted.instance == "bad"
            assert heard.failed.code in {*STRATEGY_CODES, "not_a_number"}
            continue
        assert heard.tokens == reference.greedy(random_prompt(25, seed=int(name[-1])), COUNT)
        assert heard.admitted is not None
        assert (heard.admitted.instance, heard.admitted.reason) == ("good", "fallback of bad")
    last = [driver.heard[f"3 {i}"] for i in range(2)]
    assert all(heard.failed is None for heard in last)
    assert "its rows run again one by one" not in caplog.text
    served = [record for record in driver.records if record.instance == "good"]
    assert {record.fallback_of for record in served} == {"bad"}
    driver.core.caches["good"].check_integrity()
    assert not driver.core.caches["good"].usage().seats


@pytest.mark.parametrize(
    "how", [{}, {"kv_cache": "bad"}, {"header": "bad"}, {"alias": "bad"}, {"priority": 3}], ids=str
)
def test_a_fallback_serves_however_the_instance_was_chosen(
    tiny: Path, reference: Reference, how: dict[str, Any]
) -> None:
    rules = [{"use": "bad", "min_priority": 3}] if "priority" in how else []
    driver = make_driver(tiny, "plan raises", default_strategy="good" if how else "bad", rules=rules)
    prompt = random_prompt(25)
    heard, record = driver.serve("without a fault", prompt, kv_cache="good")
    assert record is not None
    assert (record.reason, record.fallback_of) == ("request", None)
    quarantine(driver)
    heard, record = driver.serve("it", prompt, explain=True, **how)
    assert heard.tokens == reference.greedy(prompt, COUNT)
    assert record is not None
    assert (record.instance, record.reason, record.fallback_of) == ("good", "fallback of bad", "bad")
    assert heard.explained is not None
    assert heard.explained.record == record


def test_without_a_fallback_requests_are_refused_as_before(tiny: Path) -> None:
    instances = strategies(bad=faulty("open raises"), good={"kind": "paged", "fallback": "contiguous"})
    driver = make_driver(tiny, "open raises", strategies=instances)
    for i in range(3):
        heard, _ = driver.serve(f"{i}", random_prompt(20))
        assert heard.failed is not None
        assert heard.failed.code == "strategy_failed"
    heard, record = driver.serve("late", random_prompt(20))
    assert record is None
    assert heard.failed is not None
    assert (heard.failed.status, heard.failed.code) == (503, "strategy_quarantined")
    assert heard.failed.retry_after == FIRST_SECONDS
    assert not driver.core.isolation.usable("bad")
    assert driver.core.isolation.usable("good")


def test_a_fallback_at_fault_leads_to_its_own(tiny: Path, reference: Reference) -> None:
    instances = strategies(
        bad=faulty("open raises", fallback="bad_too"),
        bad_too=faulty("plan raises", fallback="good"),
        good={"kind": "paged"},
    )
    driver = make_driver(tiny, "open raises", strategies=instances)
    prompt = random_prompt(30)
    for i in range(8):
        heard, record = driver.serve(f"{i}", prompt)
        assert heard.tokens == reference.greedy(prompt, COUNT)
        assert record is not None
        assert (record.instance, record.reason) == ("good", "fallback of bad")
    assert set(driver.core.isolation.quarantined) == {"bad", "bad_too"}
    heard, record = driver.serve("by name", prompt, kv_cache="bad_too")
    assert record is not None
    assert record.reason == "fallback of bad_too"


def test_if_no_fallback_gets_requests_the_error_is_that_of_the_chosen_instance(tiny: Path) -> None:
    instances = strategies(bad=faulty("open raises", fallback="bad_too"), bad_too=faulty("plan raises"))
    driver = make_driver(tiny, "open raises", strategies=instances)
    codes = []
    for i in range(5):
        heard, _ = driver.serve(f"{i}", random_prompt(30))
        assert heard.failed is not None
        codes.append(heard.failed.code)
    assert codes == ["strategy_failed"] * 3 + ["strategy_quarantined"] * 2
    assert heard.failed is not None
    assert "cache strategy 'bad' is in quarantine" in heard.failed.message
    assert heard.failed.retry_after == FIRST_SECONDS


def test_a_request_for_which_the_fallback_has_no_room_is_told_to_come_back(tiny: Path) -> None:
    instances = strategies(
        bad=faulty("plan raises", fallback="good"), good={"kind": "contiguous", "limit": "5%", "prefix_cache": False}
    )
    settings: dict[str, Any] = {"strategies": instances, "kv_memory": "12MiB"}
    driver = make_driver(tiny, "plan raises", **settings)
    quarantine(driver)
    driver.core.caches["good"].bytes_for = lambda num_tokens: num_tokens * 2**30  # type: ignore[method-assign]
    heard, record = driver.serve("too long", random_prompt(20))
    assert record is None
    assert heard.failed is not None
    assert heard.failed.code == "strategy_quarantined"


def test_requests_that_wait_are_moved_when_a_quarantine_begins_and_those_that_run_end(
    tiny: Path, reference: Reference
) -> None:
    driver = make_driver(tiny, "usage has NaN", max_num_seqs=2)  # a fault of reports, which puts it in no quarantine
    prompts = [random_prompt(20, seed=i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        driver.submit(f"{i}", prompt, 20)
    driver.step()
    driver.step()
    assert (driver.running(), driver.waiting()) == (["0", "1"], ["2", "3", "4"])
    inner = driver.core.isolation.caches["bad"].inner
    FAULTS["plan raises"].plant(inner)
    driver.run()
    for i, prompt in enumerate(prompts):
        heard = driver.heard[f"{i}"]
        if i < 2:
            assert heard.failed is not None
            assert heard.failed.code in STRATEGY_CODES
        else:
            assert heard.tokens == reference.greedy(prompt, 20)
            assert heard.admitted is not None
            assert heard.admitted.reason == "fallback of bad"
    assert driver.core.arena.num_held_pages("bad") == 0


@pytest.mark.parametrize("what", ["open raises", "plan raises", "commit raises"])
def test_all_choices_of_a_prompt_are_answered_under_the_fallback(tiny: Path, reference: Reference, what: str) -> None:
    """The first choice is moved alone, and the others, which waited for its prompt, do not wait any more."""
    driver, prompt = make_driver(tiny, what), random_prompt(25)
    choices = [driver.submit("0", prompt, COUNT)]
    choices += [driver.submit(f"{i}", prompt, COUNT, sibling_of="0") for i in range(1, 4)]
    driver.step()
    driver.cancel("0")
    driver.run()
    assert all(choice.tokens == reference.greedy(prompt, COUNT) for choice in choices[1:])


# ---------------------------------------------------------------- the instance comes back
def test_it_comes_back_by_single_requests_with_growing_pauses(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(tiny, "plan raises")
    isolation, prompt, pause = driver.core.isolation, random_prompt(25), FIRST_SECONDS
    quarantine(driver)
    for trial in range(3):
        driver.now += pause - 1
        assert not isolation.usable("bad")
        _, record = driver.serve(f"early {trial}", prompt)
        assert record is not None
        assert record.reason == "fallback of bad"
        driver.now += 1
        assert isolation.usable("bad")
        heard, record = driver.serve(f"trial {trial}", prompt)
        assert heard.tokens == reference.greedy(prompt, COUNT), "the client of a trial notices nothing"
        assert record is not None
        assert record.instance == "good"
        pause *= 2
    heal(monkeypatch, "plan raises")
    driver.now += pause
    probe = driver.submit("probe", prompt, COUNT)
    other = driver.submit("meanwhile", prompt, COUNT)
    driver.run()
    assert probe.admitted is not None
    assert (probe.admitted.instance, probe.admitted.reason) == ("bad", "default")
    assert other.admitted is not None
    assert other.admitted.reason == "fallback of bad"
    assert probe.tokens == other.tokens == reference.greedy(prompt, COUNT)
    _, record = driver.serve("afterwards", prompt)
    assert record is not None
    assert (record.instance, record.reason, record.fallback_of) == ("bad", "default", None)
    assert isolation.quarantined == []


# ---------------------------------------------------------------- logits that are not finite
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


# ---------------------------------------------------------------- at random
@pytest.mark.fuzz
def test_random_loads_under_random_faults_are_answered_or_fail_for_a_reason(
    tiny: Path, reference: Reference, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = rng.choice(list(select("ends", "nan", plain=True)))
    driver = make_driver(tiny, what, max_num_seqs=rng.choice([2, 8]), max_num_batched_tokens=rng.choice([16, 80]))
    prompts = [random_prompt(rng.randint(2, 40), seed=i) for i in range(4)]
    asked: dict[str, list[int]] = {}
    for i in range(40):
        if i == 25:
            heal(monkeypatch, what)
        for _ in range(rng.randint(0, 3)):
            name, prompt = f"{len(asked)}", rng.choice(prompts)
            asked[name] = prompt
            siblings = [other for other in driver.heard if not driver.heard[other].ended and asked[other] == prompt]
            options = {"sibling_of": rng.choice(siblings)} if siblings and rng.random() < 0.5 else {}
            driver.submit(name, prompt, COUNT, kv_cache=rng.choice([None, "bad", "good"]), **options)
        if rng.random() < 0.1 and driver.requests:
            driver.cancel(rng.choice(driver.requests).key[1])
        driver.now += rng.choice([0.0, 1.0, 40.0])
        driver.step()
    driver.run()
    cancelled = {record.outcome for record in driver.records} - {"stop", "length", "error"}
    assert cancelled <= {"cancelled"}
    for name, prompt in asked.items():
        heard = driver.heard[name]
        if heard.failed is not None:
            assert heard.admitted is not None, heard.failed
            assert heard.failed.code in {*STRATEGY_CODES, "not_a_number"}
        else:
            assert heard.tokens == reference.greedy(prompt, COUNT)[: len(heard.tokens)]
    driver.core.caches["good"].check_integrity()
    assert not driver.core.caches["good"].usage().seats
