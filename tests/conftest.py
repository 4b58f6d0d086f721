"""What all tests run under: no setting of the shell they were started in, and one thread of arithmetic.

And which of them want the machine for themselves, while the others run in two processes.
"""

import gc
import os
import random
from pathlib import Path

import pytest

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch: threads that wait by spinning stand still on a busy machine
import torch

from tests.fuzzing.seeds import SeedPlugin, add_options

# Folders and files of tests that watch processes, or the clock.
ALONE = (
    "api",
    "cli",
    "end_to_end",
    "engine/ipc",
    "loadtest",
    "metrics/test_prometheus.py",
    "processes",
    "test_logs.py",
    "tools/torture",
)
# Folders and files of tests with thousands of cases; `--thorough-share` runs a part of them, another one in each run.
THOROUGH = (
    "cache_strategies/test_arena.py",
    "contract",
    "end_to_end/test_metal.py",
    "engine/test_deterministic.py",
    "engine/test_metal.py",
    "engine/test_random_histories.py",
    "fuzzing",
    "kernels",
    "models/test_malformed_models.py",
    "plugin_kit",
    "text/processes/test_sandbox.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption(
        "--thorough-share",
        type=float,
        default=1.0,
        help="share of the tests marked `thorough` that run, drawn by --seed (default: 1, all of them)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SeedPlugin(config))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests)
        if any(path.is_relative_to(each) for each in ALONE):
            item.add_marker(pytest.mark.alone)
        if any(path.is_relative_to(each) for each in THOROUGH):
            item.add_marker(pytest.mark.thorough)
    left_out = [item for item in items if item.get_closest_marker("thorough") and not _is_drawn(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_drawn(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether a thorough test runs. A test that is named on the command line does."""
    named = any("::" in argument for argument in config.args)
    share = config.option.thorough_share
    return named or random.Random(f"{config.option.seed} {item.nodeid} drawn").random() < share


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


@pytest.fixture
def rng() -> random.Random:
    """Return random numbers that are others in each run, and let torch draw others as well; the seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)
