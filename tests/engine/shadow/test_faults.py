"""Faults planted in every method of a candidate: the shadows end, and the requests that they repeat are answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cache_strategies.base import Locations, Rows
from server.engine.model_runner import ModelRunner, StepOutput
from server.engine.scheduling.step import Scheduled
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.isolation.faulty_strategies import faulty
from tests.engine.isolation.planted_faults import FAULTS, select

COUNT = 6  # tokens of each answer
ROUNDS = 3


class Tolerant(Driver):
    """A driver that checks the bookkeeping of the strategy without faults only."""

    @classmethod
    def with_fault(cls, directory: Path, what: str) -> Tolerant:
        """Return a driver with two instances: `good`, and `bad` with a planted fault."""
        kinds = strategies(
            good={"kind": "paged", "block_size": 8},
            bad=faulty(what),
        )
        return cls(directory, strategies=kinds, max_seq_len=96, max_num_batched_tokens=80, strategy_timeout=0.1)

    def check(self) -> None:
        self.core.instances["good"].check_integrity()

    def run_until(self, deadline: float) -> None:
        """Step until no request is left, or the monotonic clock shows `deadline`."""
        while self.core.busy and time.monotonic() < deadline:
            result = self.core.step()
            self.steps.append(result)
            for event in result.events:
                self._hear(event.message)
            self.check()


@pytest.mark.parametrize("what", select("ends", "nan", "none", "quiet", "stalls", "leaks", plain=True))
def test_a_faulty_candidate_ends_no_request(tiny: Path, reference: Reference, what: str) -> None:
    driver = Tolerant.with_fault(tiny, what)
    deadline = time.monotonic() + 30
    started = 0
    for turn in range(ROUNDS):
        for i in range(4):
            driver.submit(f"{turn} {i}", random_prompt(25, seed=i), COUNT, kv_cache="good")
            if i % 2 and "bad" not in driver.core.isolation.quarantined:
                driver.shadow(f"{turn} {i}", "bad")
                started += 1
        driver.run_until(deadline)
    assert not driver.core.busy, "a shadow waits for ever"
    for name, heard in driver.heard.items():
        assert heard.failed is None, f"{name}: {heard.failed}"
        assert heard.tokens == reference.greedy(random_prompt(25, seed=int(name.split()[1])), COUNT), name
    ends = [fidelity.ended_early for fidelity in driver.fidelities]
    assert 0 < len(ends) <= started
    effect = FAULTS[what].effect
    if effect in ("ends", "nan"):
        assert set(ends) == {"failed"}
    elif effect == "stalls":
        assert set(ends) <= {"room", "failed"}
    elif effect == "none":
        assert set(ends) == {None}
    faults = sum(step.report.failures.get("bad", 0) for step in driver.steps)
    assert faults > 0 or effect != "ends"


@pytest.mark.parametrize("what", select("ends", "nan", plain=True))
def test_a_faulty_instance_ends_its_requests_and_their_shadows_only(
    tiny: Path, reference: Reference, what: str
) -> None:
    driver = Tolerant.with_fault(tiny, what)
    for i in range(4):
        driver.submit(f"good {i}", random_prompt(25, seed=i), COUNT, kv_cache="good")
        heard = driver.submit(f"bad {i}", random_prompt(25, seed=i), COUNT, kv_cache="bad")
        if heard.failed is None:
            driver.shadow(f"bad {i}", "good")
    driver.run_until(time.monotonic() + 30)
    assert not driver.core.busy
    assert not len(driver.engine.shadows)
    for i in range(4):
        assert driver.heard[f"good {i}"].tokens == reference.greedy(random_prompt(25, seed=i), COUNT)
        assert driver.heard[f"bad {i}"].failed is not None


def test_a_request_whose_row_fails_alone_takes_its_shadow_along(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny, strategies=strategies(a={"kind": "paged", "block_size": 8}, b={"kind": "paged"}))
    for name in ("good", "bad"):
        driver.submit(name, random_prompt(25, seed=len(name)), COUNT, kv_cache="a")
        driver.shadow(name, "b")
    driver.step()
    execute = ModelRunner.execute

    def fail(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> StepOutput:
        if any(each.request.key[1] == "bad" and not each.request.is_shadow for each in scheduled):
            raise ValueError("planted")
        return execute(runner, scheduled)

    monkeypatch.setattr(ModelRunner, "execute", fail)
    driver.run()
    assert driver.heard["bad"].failed is not None
    assert driver.heard["good"].failed is None
    assert driver.heard["good"].tokens == reference.greedy(random_prompt(25, seed=4), COUNT)
    assert not len(driver.engine.shadows)


def test_a_fault_that_only_shadows_meet_ends_no_request_of_the_candidate(
    tiny: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny, strategies=strategies(a={"kind": "paged", "block_size": 8}, b={"kind": "paged"}))
    driver.submit("own", random_prompt(25, seed=1), COUNT, kv_cache="b")
    driver.submit("shadowed", random_prompt(25, seed=2), COUNT, kv_cache="a")
    driver.shadow("shadowed", "b")
    inner = driver.core.instances["b"].strategy
    locate = inner.locate

    def fail(rows: Rows) -> Locations:
        if any(each.salt is not None and each.salt.shadow for each in rows.sequences):  # type: ignore[attr-defined]
            raise ValueError("planted")
        return locate(rows)

    monkeypatch.setattr(inner, "locate", fail)
    driver.run()
    for seed, name in ((1, "own"), (2, "shadowed")):
        assert driver.heard[name].failed is None
        assert driver.heard[name].tokens == reference.greedy(random_prompt(25, seed=seed), COUNT)
    assert [each.ended_early for each in driver.fidelities] == ["failed"]
