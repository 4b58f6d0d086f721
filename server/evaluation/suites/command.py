"""Runs the suites of `kvmux evaluate --suite` with an engine that is built, and shows their progress."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.progress import Progress

from server.engine.build import Engine
from server.evaluation.flags import EvaluateOptions
from server.evaluation.suites.registry import select_tasks
from server.evaluation.suites.report import SuiteReport
from server.evaluation.suites.runner import SuiteRunner

DEFAULT_SAMPLES, QUICK_SAMPLES = 40, 26  # 26 samples that agree are within 10 points
QUICK_LENGTH = 1024  # tokens
DEFAULT_SEED = "0"


def make_runner(engine: Engine, names: Sequence[str], options: EvaluateOptions) -> SuiteRunner:
    """Return the runner of the suites that the options name, under these strategies, of which the first is exact.

    Raises SettingsError for unknown suites, and if a task does not fit --length.
    """
    return SuiteRunner(
        engine,
        names,
        select_tasks(options.suite or ["quick"]),
        samples=options.samples or (QUICK_SAMPLES if options.quick else DEFAULT_SAMPLES),
        seed=DEFAULT_SEED if options.seed is None else options.seed,
        query_aware=options.query_aware,
    )


def run_suites(runner: SuiteRunner, options: EvaluateOptions, length: int, bars: Progress) -> SuiteReport:
    """Run all samples, and return what has been measured, also after Ctrl-C. Raises SettingsError on failure."""
    started = time.monotonic()
    bar = bars.add_task("samples", total=len(runner.tasks) * runner.samples)
    scores = runner.run(lambda name: bars.update(bar, advance=1, description=f"samples of {name}"))
    return SuiteReport(
        runner.names,
        [each for each in scores if each.count],
        length,
        options.margin / 100,
        options.query_aware,
        runner.seed,
        time.monotonic() - started,
        runner.samples,
    )
