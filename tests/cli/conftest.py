"""`kvmux serve` in this process, without the processes that it would start."""

from __future__ import annotations

from typing import Any

import pytest

from server.cli import main as cli


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `kvmux serve` do everything but start other processes."""

    class NoSupervisor:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def run(self) -> int:
            return 0

    monkeypatch.setattr(cli, "Supervisor", NoSupervisor)
    monkeypatch.setattr(cli, "configure_logging", lambda settings: None)
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {})())
    monkeypatch.setenv("KVMUX_PORT", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
