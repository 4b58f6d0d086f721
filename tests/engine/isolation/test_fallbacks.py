"""Fallbacks: another instance serves the requests of one at fault, with the right texts, until that comes back.

Faults are those of tests/engine/isolation; expected texts are computed without a cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from server.engine.instance_reports import read_usage
from server.engine.isolation.quarantine import FIRST_SECONDS
from tests.engine.engine_driver import strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.fallback_driver import COUNT, STRATEGY_CODES, heal, make_driver, quarantine
from tests.engine.isolation.faulty_strategies import faulty
from tests.engine.isolation.planted_faults import FAULTS, select


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
    assert driver.core.isolation.quarantined == ([] if FAULTS[what].effect == "nan" else ["bad"])
    for name, heard in driver.heard.items():
        if heard.failed is not None:
            assert heard.admitted is not None
            assert heard.admitted.instance == "bad"
            assert heard.failed.code in {*STRATEGY_CODES, "not_a_number"}
            continue
        assert heard.tokens == reference.greedy(random_prompt(25, seed=int(name[-1])), COUNT)
        assert heard.admitted is not None
        assert (heard.admitted.instance, heard.admitted.reason) == ("good", "fallback of bad")
    if FAULTS[what].effect != "nan":  # which is found after the first token, and begins no quarantine
        assert all(driver.heard[f"3 {i}"].failed is None for i in range(2))
    assert "its rows run again one by one" not in caplog.text
    assert {record.fallback_of for record in driver.records if record.instance == "good"} <= {"bad"}
    driver.core.instances["good"].check_integrity()
    assert not read_usage(driver.core.instances["good"]).seats


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"kv_cache": "bad"},
        {"kv_cache": "bad", "named_by": "header"},
        {"kv_cache": "bad", "named_by": "model"},
        {"priority": 3},
    ],
    ids=str,
)
def test_a_fallback_serves_however_the_instance_was_chosen(
    tiny: Path, reference: Reference, how: dict[str, Any]
) -> None:
    rules = [{"use": "bad", "min_priority": 3}] if "priority" in how else []
    driver = make_driver(tiny, "locate raises", default_strategy="good" if how else "bad", rules=rules)
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


def test_a_fallback_serves_in_place_of_a_disabled_instance(tiny: Path, reference: Reference) -> None:
    driver, prompt = make_driver(tiny, "usage has NaN"), random_prompt(25)
    driver.core.isolation.disabled["bad"] = "open() did not return"
    assert not driver.core.isolation.usable("bad")
    heard, record = driver.serve("it", prompt)
    assert heard.tokens == reference.greedy(prompt, COUNT)
    assert record is not None
    assert (record.instance, record.reason) == ("good", "fallback of bad")


def test_a_fallback_at_fault_leads_to_its_own(tiny: Path, reference: Reference) -> None:
    instances = strategies(
        bad=faulty("open raises", fallback="bad_too"),
        bad_too=faulty("locate raises", fallback="good"),
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
    instances = strategies(bad=faulty("open raises", fallback="bad_too"), bad_too=faulty("locate raises"))
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
        bad=faulty("locate raises", fallback="good"), good={"kind": "contiguous", "limit": "5%", "prefix_cache": False}
    )
    settings: dict[str, Any] = {"strategies": instances, "kv_memory": "12MiB"}
    driver = make_driver(tiny, "locate raises", **settings)
    quarantine(driver)
    driver.core.instances["good"].bytes_for = lambda num_tokens: num_tokens * 2**30  # type: ignore[method-assign]
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
    inner = driver.core.instances["bad"].strategy
    FAULTS["locate raises"].plant(inner)
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
    assert driver.core.memory.get_held_bytes("bad") == 0


@pytest.mark.parametrize("what", ["open raises", "locate raises", "commit raises"])
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
    driver = make_driver(tiny, "locate raises")
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
    heal(monkeypatch, "locate raises")
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
    driver.core.instances["good"].check_integrity()
    assert not read_usage(driver.core.instances["good"]).seats
