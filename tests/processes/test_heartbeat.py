"""The record of a strategy's running call, by which the supervisor names a call that does not return."""

from __future__ import annotations

import re
from multiprocessing import get_context
from pathlib import Path

import pytest

from server.engine.isolation import guard
from server.engine.isolation.calls import NUM_CODES
from server.processes import heartbeat
from server.processes.heartbeat import StrategyCalls

ENGINE = Path(guard.__file__).parents[1]
CALL = re.compile(r"(?:self\._run|\.call|call_quietly|_call_for|_pin)\(\s*(?:\w+, )?\"(\w+)\"")


def test_every_method_that_the_engine_calls_through_a_guard_has_a_number() -> None:
    """A method without a number could not be named if its call did not return."""
    files = (
        ENGINE / "isolation" / "guard.py",
        ENGINE / "admin.py",
        ENGINE / "live" / "pages.py",
        ENGINE / "live" / "routing.py",
    )
    called = {name for file in files for name in CALL.findall(file.read_text())}
    assert {"open", "grow", "plan", "attend", "count_dropped_tokens", "usage", "pin", "clear", "inspect"} <= called
    assert called == {*StrategyCalls.METHODS}


def test_a_call_is_named_while_it_runs() -> None:
    calls = StrategyCalls(get_context("spawn"), ["paged", "ring"])
    assert calls.find_stuck(0.0, 1.0) is None
    for instance in ("paged", "ring"):
        for method in StrategyCalls.METHODS:
            calls.running[0] = NUM_CODES + calls.encode_methods(instance)[method]
            stuck = calls.find_stuck(0.0, 1.0)
            assert stuck is not None
            assert (stuck.instance, stuck.method) == (instance, method)
            assert calls.find_stuck(1000.0, 1.0) is None
            calls.running[0] = 0
    assert calls.find_stuck(0.0, 1.0) is None


def test_time_without_checks_is_not_counted_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now)
    calls = StrategyCalls(get_context("spawn"), ["paged"])
    calls.running[0] = NUM_CODES + calls.encode_methods("paged")["plan"]
    assert calls.find_stuck(5.0, 1.0) is None
    now += 3600  # the machine slept
    assert calls.find_stuck(5.0, 1.0) is None
    for _ in range(2):
        now += 1
        assert calls.find_stuck(5.0, 1.0) is None
    now += 1
    assert calls.find_stuck(5.0, 1.0) == ("paged", "plan", 5.0)
    calls.restart_timer()
    assert calls.find_stuck(5.0, 1.0) is None
