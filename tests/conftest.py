"""What all tests run under: no setting of the shell they were started in, and one thread of arithmetic.

And which of them run apart from those that compute: they watch processes or the clock, and mostly wait.
"""

import functools
import gc
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzzing.seeds import SEED, SeedPlugin, add_options

# Read by torch when it is imported, which takes two seconds, and which not every file of tests does: threads that wait
# by spinning stand still on a busy machine.
os.environ["OMP_WAIT_POLICY"] = "passive"
ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# Folders and files of tests that watch processes, or the clock.
APART = (
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
    "cache_strategies/test_memory.py",
    "contract",
    "end_to_end/test_metal.py",
    "engine/test_deterministic.py",
    "engine/test_metal.py",
    "engine/test_random_histories.py",
    "fuzzing",
    "kernels",
    "metal_emulator",
    "models/test_malformed_models.py",
    "plugin_kit",
    "text/processes/test_sandbox.py",
)


# Folders and files with few tests that take long: they run first, so that no process waits for another at the end.
FIRST = (
    "tools/torture",
    "end_to_end",
    "processes",
    "real",
    "tools",
    "models/test_malformed_models.py",
    "plugin_kit",
    "fuzzing",
    "text/tool_parsers",
)


LAST_DRAW = "thorough/last-draw"  # where pytest's cache keeps the seed and the share of the last draw


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    group = parser.getgroup("thorough tests").addoption
    group(
        "--thorough-share",
        type=float,
        help="share of the tests marked `thorough` that run, drawn by --seed (default: all of them)",
    )
    group(
        "--thorough-rest",
        action="store_true",
        help="run only the tests marked `thorough` that the last run with --thorough-share did not draw",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SeedPlugin(config))
    if config.option.thorough_share is not None and not hasattr(config, "workerinput"):  # not in processes of xdist
        config.cache.set(LAST_DRAW, {"seed": config.stash[SEED], "share": config.option.thorough_share})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which the command selects no test: to import all files takes half a minute."""
    if collection_path.suffix != ".py":
        return None
    marks = _get_marks(collection_path)
    words = set(re.findall(r"(?:not )?\w+", config.option.markexpr))
    is_unwanted = any(f"not {mark}" in words for mark in marks)
    is_wanted = "apart" not in words or "apart" in marks or "mark.apart" in collection_path.read_text()
    is_left_out = config.option.thorough_rest and "thorough" not in marks
    return True if is_unwanted or not is_wanted or is_left_out else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in _get_marks(item.path):
            item.add_marker(mark)
    items.sort(key=lambda item: _get_rank(item.path))
    drawn, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (drawn if _is_drawn(config, item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = drawn


@functools.cache
def _get_marks(path: Path) -> frozenset[str]:
    """Return the marks of a file's tests: `apart`, `thorough`, both or none."""
    path = path.relative_to(Path(__file__).parent)
    paths = {"apart": APART, "thorough": THOROUGH}
    return frozenset(mark for mark, those in paths.items() if any(path.is_relative_to(each) for each in those))


@functools.cache
def _get_rank(path: Path) -> int:
    """Return the place of a file in the order of the tests."""
    path = path.relative_to(Path(__file__).parent)
    return next((rank for rank, each in enumerate(FIRST) if path.is_relative_to(each)), len(FIRST))


def _is_drawn(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether a test runs: each that is not thorough, is named on the command line, or is drawn by the seed."""
    thorough = item.get_closest_marker("thorough") is not None
    if config.option.thorough_rest:
        last = config.cache.get(LAST_DRAW, None)
        if last is None:
            raise pytest.UsageError("--thorough-rest: no run with --thorough-share came before")
        return thorough and not _draw(last["seed"], last["share"], item)
    share, named = config.option.thorough_share, any("::" in argument for argument in config.args)
    return not thorough or share is None or named or _draw(config.stash[SEED], share, item)


def _draw(seed: int, share: float, item: pytest.Item) -> bool:
    return random.Random(f"{seed} {item.nodeid} drawn").random() < share


def pytest_collection_finish() -> None:
    """All that the libraries made by now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _default_signals_in_children() -> Iterator[None]:
    """Let processes that tests start act on signals, though nohup or a shell's `&` has pytest ignore some.

    A new program inherits what is ignored, but has the default action where this process has a handler. The handler
    does nothing, so that pytest goes on ignoring the signal. Not in `pytest_configure`: pytest-xdist's processes have
    to inherit it still.
    """
    ignored = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVMUX_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from more, and lose much on a busy machine. An engine with more may have been here."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture
def rng() -> random.Random:
    """Return random numbers that follow from the seed of the run and the test's name; let torch draw such, too."""
    import torch

    seed = random.randrange(1 << 32)
    torch.manual_seed(seed)
    return random.Random(seed)
