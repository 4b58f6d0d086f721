"""`kvmux bench`: from the command line's options to a report. Wires plan, client, rounds and report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import SystemRandom
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from loadtest.bench.ask import Ask, Outcome
from loadtest.bench.client import ServerError, complete, connected, look
from loadtest.bench.figures import Figures, Key
from loadtest.bench.flags import BenchOptions
from loadtest.bench.plan import fit_all, planned, rounds_of, strategies_of
from loadtest.bench.report import BenchReport, as_json, as_text
from loadtest.bench.rounds import Rounds
from loadtest.bench.workloads import Workload, WorkloadError
from loadtest.listing import ListingError

USER_ERROR = 2  # exit code: something the user can change
STANDARD_OUTPUT = Path("-")
MOST_MESSAGES = 3


def run(options: dict[str, Any]) -> int:
    """`options` are the flags given, fields of Wanted; the exit code."""
    wanted = BenchOptions(**{"api_key": os.environ.get("OPENAI_API_KEY", ""), **options})
    wanted = replace(wanted, seed=SystemRandom().randrange(1 << 32) if wanted.seed is None else wanted.seed)
    try:
        workloads = planned(wanted)
        make_file(wanted.json)
        return tell(asyncio.run(bench(wanted, workloads)), wanted.json)
    except (ServerError, WorkloadError, ListingError, FileError) as error:
        print(f"kvmux: {error}", file=sys.stderr)
        return USER_ERROR


class FileError(Exception):
    """The report's file cannot be written."""


def make_file(file: Path | None) -> None:
    """Before anything slow; what an older one holds stays until there is a report. Raises FileError."""
    if file not in (None, STANDARD_OUTPUT):
        with writing(file):
            file.open("a").close()


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raises FileError if it fails."""
    try:
        yield
    except OSError as error:
        raise FileError(f"--json: cannot write {file}: {error.strerror}") from None


# ---------------------------------------------------------------- doing it
async def bench(wanted: BenchOptions, workloads: Sequence[Workload]) -> BenchReport:
    """Raises ServerError, WorkloadError and ListingError."""
    date, seed = datetime.now().astimezone(), wanted.seed or 0
    async with connected(wanted.url, wanted.api_key) as client:
        server = await look(client, wanted.model)
        fitted, notes = fit_all(workloads, server)
        strategies = strategies_of(server, wanted.strategies, mixed=wanted.mixed)
        rounds = rounds_of(wanted)
        figures: dict[Key, Figures] = {}
        with progress() as bars:
            count = len(strategies) * rounds * sum(each.requests * len(each.phases) for each in fitted)
            task = bars.add_task("warming up", total=count)

            def tell(what: str) -> None:
                bars.update(task, description=what)

            async def send(model: str, ask: Ask, counts: bool) -> Outcome:
                outcome = await complete(client, model, ask, wanted.body)
                bars.advance(task, int(counts))
                return outcome

            measuring = Rounds(strategies, server.vocabulary, seed, rounds, send, tell)
            for workload in fitted:
                figures |= await measuring.measure(workload)
    return BenchReport(server, date, told_options(wanted, rounds), fitted, [*notes, *notes_on(figures)], figures)


def notes_on(figures: Mapping[Key, Figures]) -> list[str]:
    short = sum(each.short for each in figures.values())
    return [f"{short} answers have not the length asked for, so compare with care"] if short else []


def told_options(wanted: BenchOptions, rounds: int) -> dict[str, Any]:
    """For the report, without the key."""
    options = {name: value for name, value in vars(wanted).items() if name not in ("api_key", "json")}
    return options | {"rounds": rounds, "trace": wanted.trace and str(wanted.trace)}


def progress() -> Progress:
    """On standard error, and only if somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ---------------------------------------------------------------- telling it
def tell(report: BenchReport, file: Path | None) -> int:
    """Prints and writes the report; the exit code. Raises FileError."""
    text = json.dumps(as_json(report), indent=2, allow_nan=False)
    if file == STANDARD_OUTPUT:
        print(text)
    else:
        print(as_text(report))
        if file:
            with writing(file):
                file.write_text(text + "\n")
    for line in failures(report):
        print(line, file=sys.stderr)
    return 1 if report.failed else 0


def failures(report: BenchReport) -> list[str]:
    """How many requests failed, and the most frequent reasons."""
    errors = sum((each.errors for each in report.figures.values()), Counter[str]())
    reasons = [f"  {count}x {message}" for message, count in errors.most_common(MOST_MESSAGES)]
    return [f"kvmux: {report.failed} requests failed:", *reasons] if reasons else []
