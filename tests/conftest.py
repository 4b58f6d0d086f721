"""What all tests run under: no setting of the shell they were started in, and one thread of arithmetic."""

import gc
import os

import pytest

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch: threads that wait by spinning stand still on a busy machine
import torch


def pytest_collection_finish() -> None:
    """All that the libraries made by now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVMUX_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from more, and lose much on a busy machine. An engine with more may have been here."""
    torch.set_num_threads(1)
