"""A capture of Metal launches: which steps are in it, and what is refused. torch's own capture is played here."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from config.errors import SettingsError
from config.settings import Settings
from kernels.device import get_device
from server.engine.loop import Loop
from server.engine.profiling.capture import Capture
from server.metrics.registry import Metrics
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import random_prompt


class Played:
    """What stands for torch.mps.profiler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, enabled: bool = True, fails: bool = False) -> None:
        self.happened: list[str] = []
        self._fails = fails
        monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: enabled)
        monkeypatch.setattr(torch.mps.profiler, "metal_capture", self._capture)

    @contextmanager
    def _capture(self, name: str) -> Iterator[None]:
        if self._fails:
            raise RuntimeError("Failed to start capture")
        self.happened.append(f"begins {name}")
        try:
            yield
        finally:
            self.happened.append("ends")


def test_the_first_steps_are_captured_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_mps = Played(monkeypatch)
    with Capture.begin(2, get_device("mps")) as capture:
        assert torch_mps.happened == ["begins kvmux"]
        capture.count_step()
        assert torch_mps.happened == ["begins kvmux"]
        for _ in range(3):
            capture.count_step()
            assert torch_mps.happened == ["begins kvmux", "ends"]
    assert torch_mps.happened == ["begins kvmux", "ends"]


def test_a_capture_ends_with_the_engine_at_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_mps = Played(monkeypatch)
    with pytest.raises(KeyError), Capture.begin(2, get_device("mps")):
        raise KeyError
    assert torch_mps.happened == ["begins kvmux", "ends"]


def test_without_steps_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_mps = Played(monkeypatch, fails=True)
    with Capture.begin(None, get_device("cpu")) as capture:
        capture.count_step()
    assert torch_mps.happened == []


@pytest.mark.parametrize(
    ("device", "metal", "told"),
    [
        ("cpu", {}, "there are no Metal launches to capture on cpu"),
        ("metal-emulated", {}, "there are no Metal launches to capture on metal-emulated"),
        ("mps", {"enabled": False}, "start the server with MTL_CAPTURE_ENABLED=1 in its environment"),
        ("mps", {"fails": True}, "0000-kvmux.gputrace cannot be captured: Failed to start capture"),
    ],
)
def test_what_cannot_be_captured_is_refused(
    device: str, metal: dict[str, bool], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Played(monkeypatch, **metal)
    with pytest.raises(SettingsError, match=f"metal_capture_steps: .*{told}"):
        Capture.begin(3, get_device(device))


def test_the_engine_counts_steps_that_compute(tiny: Path) -> None:
    """Two idle turns, then a request of three tokens."""
    driver = Driver(tiny, max_seq_len=60)
    counted: list[int] = []
    server: Any = _FakeEngineServer()
    loop = Loop(driver.engine, server, Metrics, beat=lambda: None, on_step=lambda: counted.append(turns[0]))
    turns = [0]

    def turn() -> None:
        turns[0] += 1
        if turns[0] == 3:
            driver.submit("it", random_prompt(5), 3)
        if turns[0] == 9:
            loop.stop()

    server.inbox.turn = turn
    loop.run()
    assert counted == [3, 4, 5]


class _FakeEngineServer:
    """Nobody says anything, and nobody listens."""

    def __init__(self) -> None:
        self.inbox = _Inbox()

    def send(self, worker: int, messages: object) -> None:
        pass


class _Inbox:
    turn: Any = None

    def get(self, *, block: bool, timeout: float | None) -> None:
        self.turn()
        raise queue.Empty


def test_the_setting_takes_numbers_of_steps() -> None:
    assert Settings(metal_capture_steps=3).metal_capture_steps == 3
    with pytest.raises(ValueError, match="metal_capture_steps"):
        Settings(metal_capture_steps=0)
