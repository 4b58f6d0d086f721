"""Whoever uses the machine beside us is seen, and what we do ourselves is not taken for somebody else's."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from server.profiling import background_load
from server.profiling.background_load import BUSY_THRESHOLD, Neighbours, format_warning


class Machine:
    """Two processors whose clocks are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self.user = self.steal = self.idle = self.ours = 0.0
        monkeypatch.setattr(background_load.os, "cpu_count", lambda: 2)
        monkeypatch.setattr(background_load, "monotonic", lambda: self.clock)
        monkeypatch.setattr(psutil, "cpu_times", self.times)
        monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: (self.ours, 0.0, 0.0, 0.0)))

    def times(self) -> SimpleNamespace:
        now = {"user": self.user, "steal": self.steal, "idle": self.idle, "guest": self.user}
        return SimpleNamespace(_asdict=lambda: now)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_we_use_is_not_others(machine: Machine) -> None:
    seen = Neighbours()
    machine.clock, machine.user, machine.idle, machine.ours = 10.0, 12.0, 8.0, 5.0
    assert seen.compute_share(own=7.0) == 0
    assert seen.compute_share(own=8.0) == 0, "clocks are coarse"


def test_others_are_seen_and_so_is_a_host_that_takes_its_time(machine: Machine) -> None:
    seen = Neighbours()
    machine.clock, machine.user, machine.ours = 10.0, 9.0, 5.0
    assert seen.compute_share() == pytest.approx(4 / 20)
    machine.steal = 2.0
    assert seen.compute_share() == pytest.approx(6 / 20)


def test_only_a_busy_one_is_told() -> None:
    assert format_warning(BUSY_THRESHOLD) == ""
    assert "used 20% of the machine" in format_warning(0.2)
