"""`kvmux bench`: runs a benchmark and writes its report. Connects the plan, the client, the rounds and the report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import SystemRandom
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from config.errors import SettingsError, convert_write_errors
from loadtest.bench.client import ServerError, open_client, read_server_info, send_completion
from loadtest.bench.figures import Figures, Key
from loadtest.bench.flags import BenchOptions
from loadtest.bench.plan import fit_workloads, get_num_rounds, plan_workloads, select_strategies
from loadtest.bench.report import BenchReport, as_json, as_text
from loadtest.bench.rounds import Rounds
from loadtest.bench.types import BenchRequest, Outcome
from loadtest.bench.workloads import Workload, WorkloadError
from loadtest.listing import ListingError

USER_ERROR = 2  # exit code for an error that the user can fix, such as a wrong flag
STANDARD_OUTPUT = Path("-")
MAX_ERROR_MESSAGES = 3


def run(flags: dict[str, Any]) -> int:
    """Run a benchmark and return the exit code; `flags` are the values of given flags, by field of BenchOptions."""
    options = BenchOptions(**{"api_key": os.environ.get("OPENAI_API_KEY", ""), **flags})
    options = replace(options, seed=SystemRandom().randrange(1 << 32) if options.seed is None else options.seed)
    try:
        workloads = plan_workloads(options)
        check_writable(options.json)
        return write_report(asyncio.run(run_benchmark(options, workloads)), options.json)
    except (ServerError, WorkloadError, ListingError, SettingsError) as error:
        print(f"kvmux: {error}", file=sys.stderr)
        return USER_ERROR


def check_writable(file: Path | None) -> None:
    """Raise SettingsError if the report's file cannot be written, before the benchmark. Keeps the file's contents.

    Checks nothing for None (no file) and "-" (standard output).
    """
    if file not in (None, STANDARD_OUTPUT):
        with convert_write_errors("--json", file):
            file.open("a").close()


# ---------------------------------------------------------------- measuring
async def run_benchmark(options: BenchOptions, workloads: Sequence[Workload]) -> BenchReport:
    """Measure the workloads on the server of the options; return the report.

    Raises ServerError if the server cannot be measured, WorkloadError if its context is too short for a workload, and
    ListingError if it does not list a requested strategy.
    """
    date, seed = datetime.now().astimezone(), options.seed or 0
    async with open_client(options.url, options.api_key) as client:
        server = await read_server_info(client, options.model)
        fitted, notes = fit_workloads(workloads, server)
        strategies = select_strategies(server, options.strategies, mixed=options.mixed)
        rounds = get_num_rounds(options)
        figures: dict[Key, Figures] = {}
        with make_progress_bar() as bars:
            count = len(strategies) * rounds * sum(each.requests * len(each.phases) for each in fitted)
            task = bars.add_task("warming up", total=count)

            def show_status(what: str) -> None:
                bars.update(task, description=what)

            async def send(model: str, request: BenchRequest, counts: bool) -> Outcome:
                outcome = await send_completion(client, model, request, options.body or {})
                bars.advance(task, int(counts))
                return outcome

            measuring = Rounds(strategies, server.vocabulary, seed, rounds, send, show_status, options.warm_up)
            for workload in fitted:
                figures |= await measuring.measure(workload)
    return BenchReport(
        server, date, get_report_options(options, rounds), fitted, [*notes, *make_notes(figures)], figures
    )


def make_notes(figures: Mapping[Key, Figures]) -> list[str]:
    num_wrong = sum(each.num_wrong_length for each in figures.values())
    return [f"{num_wrong} answers do not have the requested length, so compare with care"] if num_wrong else []


def get_report_options(options: BenchOptions, rounds: int) -> dict[str, Any]:
    """Return the options as the report shows them: with the number of rounds, without the API key."""
    shown = {name: value for name, value in vars(options).items() if name not in ("api_key", "json")}
    return shown | {"rounds": rounds, "trace": options.trace and str(options.trace)}


def make_progress_bar() -> Progress:
    """Return a progress bar on standard error, shown only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ---------------------------------------------------------------- reporting
def write_report(report: BenchReport, file: Path | None) -> int:
    """Print the report, and write it to `file` if given; return the exit code, 1 if a request failed.

    Raises SettingsError if the file cannot be written.
    """
    text = json.dumps(as_json(report), indent=2, allow_nan=False)
    if file == STANDARD_OUTPUT:
        print(text)
    else:
        print(as_text(report))
        if file:
            with convert_write_errors("--json", file):
                file.write_text(text + "\n")
    for line in format_failures(report):
        print(line, file=sys.stderr)
    return 1 if report.num_failed else 0


def format_failures(report: BenchReport) -> list[str]:
    """Return lines of text: the number of failed requests and the most frequent reasons; [] if no request failed."""
    errors = sum((each.error_counts for each in report.figures.values()), Counter[str]())
    reasons = [f"  {count}x {message}" for message, count in errors.most_common(MAX_ERROR_MESSAGES)]
    return [f"kvmux: {report.num_failed} requests failed:", *reasons] if reasons else []
