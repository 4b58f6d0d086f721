"""What random tests draw from: a seed of the whole run, drawn anew unless `--seed` names one, and the kept failures.

A plugin of pytest that tests/conftest.py registers. Knows when a run must end, and no test.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, core
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.fuzzing.corpus import KEPT, Corpus

PROFILE = "drawn anew"
SEED = pytest.StashKey[int]()  # of the whole run: the same in all processes of xdist


def add_options(parser: pytest.Parser) -> None:
    """Add the options of random tests."""
    group = parser.getgroup("random tests")
    group.addoption("--seed", type=int, help="what all random tests draw from (default: another one in each run)")
    group.addoption("--corpus", default=str(KEPT), help="folder of failing examples, replayed and added to")
    group.addoption("--until", type=float, default=float("inf"), help="time.time() after which no test starts")


def _get_seed(config: pytest.Config) -> int:
    """Return the seed of the option or of the process that started this one; else a new one."""
    handed_on = getattr(config, "workerinput", {}).get("seed", config.option.seed)
    return random.SystemRandom().randrange(2**32) if handed_on is None else int(handed_on)


class SeedPlugin:
    """Seeds each test by the run's seed and its own name, so that it draws the same when it runs by itself."""

    def __init__(self, config: pytest.Config) -> None:
        self._seed = config.stash[SEED] = _get_seed(config)
        # Hypothesis draws constants of the project's modules now and then, of all that are imported: what a seed draws
        # would depend on which other files are collected.
        providers._get_local_constants = Constants
        self._until: float = config.option.until
        hypothesis.settings.register_profile(
            PROFILE,
            derandomize=False,  # where CI is set, too
            database=Corpus(Path(config.option.corpus)),
            deadline=None,
            phases=set(Phase) - {Phase.explain},  # takes minutes for a history, and says nothing of its steps
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        hypothesis.settings.load_profile(PROFILE)

    @pytest.hookimpl(optionalhook=True)  # where xdist is not installed
    def pytest_configure_node(self, node: Any) -> None:
        """Hand the seed to a process of xdist, which gets only the command line otherwise."""
        node.workerinput["seed"] = self._seed

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out what would start too late."""
        return True if time.time() > self._until else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed = f"{self._seed} {item.nodeid}"
        random.seed(seed)
        # Hypothesis has an option of this kind, with which it neither keeps nor replays a failure.
        core.threadlocal._hypothesis_global_random = random.Random(seed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.stats.get("failed"):
            terminalreporter.write_line(
                f"Random tests drew from --seed {self._seed}. What they found is kept in {KEPT.name}/ "
                "(CONTRIBUTING.md) and replayed from now on."
            )
