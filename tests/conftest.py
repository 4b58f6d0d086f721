"""What all tests run under: no setting of the shell they were started in, and one thread of arithmetic.

And which of them want the machine for themselves, while the others run in two processes.
"""

import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch: threads that wait by spinning stand still on a busy machine
import torch

from tests.fuzzing.drawing import Drawing, add_options

ALONE = {"api", "cli", "loadtest", "server", "tools"}  # folders of tests that watch processes, or the clock
ALONE_TOO = {"test_in_prometheus.py", "test_logs.py"}
THOROUGH = {"contract", "fuzzing", "kernels"}  # folders of tests with thousands of cases
THOROUGH_TOO = {"test_malformed.py", "test_sandbox.py", "test_deterministic.py", "test_histories.py", "test_metal.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Drawing(config))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).parts[0] in ALONE or item.path.name in ALONE_TOO:
            item.add_marker(pytest.mark.alone)
        if item.path.relative_to(tests).parts[0] in THOROUGH or item.path.name in THOROUGH_TOO:
            item.add_marker(pytest.mark.thorough)


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
