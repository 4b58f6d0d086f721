"""What all tests run under: no setting of the shell they were started in, and one thread of arithmetic."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVMUX_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors gain nothing from more, and lose much on a busy machine."""
    torch.set_num_threads(1)
