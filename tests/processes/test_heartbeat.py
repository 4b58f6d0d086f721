"""The record of a strategy's running call, by which the supervisor names a call that does not return."""

from __future__ import annotations

import re
from multiprocessing import get_context
from pathlib import Path

import pytest

from server.engine.calls import NUM_CODES
from server.processes import heartbeat
from server.processes.heartbeat import StrategyCalls

ROOT = Path(heartbeat.__file__).parents[1]
CALL = re.compile(
    r"(?:guard\[|\.call\(|\battempt\(|\breport\((?:instance, )?|_pin\(instance, |_count_bytes\()\"(\w+)\""
)


def test_every_guarded_call_has_a_number() -> None:
    """One without a number could not be named if a call in it did not return."""
    files = [*ROOT.glob("engine/**/*.py"), ROOT / "sequence.py", ROOT / "evaluation" / "compare.py"]
    entered = {name for file in files for name in CALL.findall(file.read_text())}
    assert {"open", "schedule", "locate", "attend", "count_visible", "usage", "pin", "clear"} <= entered
    assert entered == {*StrategyCalls.METHODS}


def test_a_call_is_named_while_it_runs() -> None:
    calls = StrategyCalls(get_context("spawn"), ["paged", "ring"])
    assert calls.find_stuck(0.0, 1.0) is None
    for instance in ("paged", "ring"):
        for method in StrategyCalls.METHODS:
            calls.running[0] = NUM_CODES + calls.encode_methods(instance)[method]
            stuck = calls.find_stuck(0.0, 1.0)
            assert stuck is not None
            assert (stuck.instance, stuck.method) == (instance, method.replace("schedule", heartbeat.SCHEDULING))
            assert calls.find_stuck(1000.0, 1.0) is None
            calls.running[0] = 0
    assert calls.find_stuck(0.0, 1.0) is None


def test_time_without_checks_is_not_counted_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now)
    calls = StrategyCalls(get_context("spawn"), ["paged"])
    calls.running[0] = NUM_CODES + calls.encode_methods("paged")["locate"]
    assert calls.find_stuck(5.0, 1.0) is None
    now += 3600  # the machine slept
    assert calls.find_stuck(5.0, 1.0) is None
    for _ in range(2):
        now += 1
        assert calls.find_stuck(5.0, 1.0) is None
    now += 1
    assert calls.find_stuck(5.0, 1.0) == ("paged", "locate", 5.0)
    calls.restart_timer()
    assert calls.find_stuck(5.0, 1.0) is None
