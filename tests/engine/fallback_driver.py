"""Drives an engine with a strategy at fault and its fallback; the quarantine has a clock that tests set."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.engine.results import StepResult
from server.records import RequestRecord
from tests.engine.engine_driver import Driver, RequestEvents, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.isolation.faulty_strategies import faulty
from tests.engine.isolation.planted_faults import FAULTS

COUNT = 6  # tokens of each answer
STRATEGY_CODES = {"strategy_failed", "strategy_quarantined"}


class FallbackDriver(Driver):
    """A driver of an engine with instances whose names begin with "bad", which are not checked, and a clock."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        defaults = {"max_seq_len": 96, "max_num_batched_tokens": 80, "strategy_timeout": 0.1}
        super().__init__(directory, **(defaults | settings))
        self.now = 1000.0
        self.core.isolation._quarantine._clock = lambda: self.now

    def check(self) -> None:
        for name, cache in self.core.instances.items():
            if not name.startswith("bad"):
                cache.check_integrity()
        for request in self.requests:
            assert request in request.siblings
            assert {sibling.instance for sibling in request.siblings} == {request.instance}

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
