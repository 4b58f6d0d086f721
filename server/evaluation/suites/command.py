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


def run_suites(engine: Engine, names: Sequence[str], options: EvaluateOptions, bars: Progress) -> SuiteReport:
    """Run the suites that the options name under these strategies, of which the first is exact.

    Raises SettingsError if a task does not fit `--length`, before the first one runs.
    """
    tasks = select_tasks(options.suite or ["quick"])
    samples = options.samples or (QUICK_SAMPLES if options.quick else DEFAULT_SAMPLES)
    seed = DEFAULT_SEED if options.seed is None else options.seed
    started = time.monotonic()
    runner = SuiteRunner(engine, names, seed=seed, query_aware=options.query_aware)
    bar = bars.add_task("samples", total=len(tasks) * samples)
    scores = runner.run(tasks, samples, lambda name: bars.update(bar, advance=1, description=f"samples of {name}"))
    return SuiteReport(
        names,
        [each for each in scores if each.count],
        engine.max_seq_len,
        options.margin / 100,
        options.query_aware,
        seed,
        time.monotonic() - started,
        samples,
    )
