"""Formats the results of chaos and soak runs as tables and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.torture.chaos import ChaosReport
from tools.torture.soak import MIN_JUDGED_SECONDS, SoakReport, Trend
from tools.torture.tally import Tally

WIDTH = 120  # columns of output that is not a terminal
NOT_COMPARED = (
    "Texts were not compared: without the C++ kernels, answers differ in rounding from batch to batch. Only choices, "
    "finish reasons, prompts and usage were compared."
)


def make_console(json: str) -> Console:
    """Return a console for the tables: on stderr if JSON is written to stdout, and wide if it is not a terminal."""
    console = Console(stderr=json == "-")
    return console if console.is_terminal else Console(stderr=json == "-", width=WIDTH)


def print_tables(console: Console, title: str, tables: Iterable[Table], tally: Tally, *, exact: bool) -> None:
    """Print tables, counts and problems."""
    console.rule(title)
    for table in tables:
        console.print(table)
    console.print(_make_table("counts", ("", "number"), [(name, f"{n:,}") for name, n in sorted(tally.counts.items())]))
    if not exact:
        console.print(NOT_COMPARED)
    if not tally.problems:
        console.print("No problems.")
        return
    console.print(
        _make_table("problems", ("", "number"), [(name, f"{n:,}") for name, n in tally.problems.most_common()])
    )
    for name, examples in tally.examples.items():
        for example in examples:
            console.print(f"{name}: {example}", markup=False, highlight=False)


def _make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def write_json(path: str, found: Mapping[str, Any]) -> None:
    """Write an object to a file, or to stdout for "-"."""
    text = json.dumps(found, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def tally_as_json(tally: Tally) -> dict[str, Any]:
    return {"counts": dict(tally.counts), "problems": dict(tally.problems), "examples": dict(tally.examples)}


# ---------------------------------------------------------------- chaos
def make_chaos_tables(report: ChaosReport) -> list[Table]:
    rows = [
        (
            name,
            str(len(each.answering_seconds)) + (", no target" if each.num_without_target else ""),
            _format_median_and_max(each.answering_seconds),
            _format_median_and_max(each.whole_seconds),
        )
        for name, each in report.recoveries.items()
    ]
    columns = ("fault", "injected", "answers again: median, max", "all processes back: median, max")
    return [_make_table("seconds from a fault", columns, rows)]


def chaos_as_json(report: ChaosReport) -> dict[str, Any]:
    recoveries = {
        name: {
            "injected": len(each.answering_seconds),
            "answering_seconds": each.answering_seconds,
            "whole_seconds": each.whole_seconds,
        }
        for name, each in report.recoveries.items()
    }
    return {
        "seed": report.plan.seed,
        "seconds": report.seconds,
        "starts": report.starts,
        "texts_compared": report.exact,
        "faults": recoveries,
        **tally_as_json(report.tally),
    }


def _format_median_and_max(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f}, {max(seconds):.2f}" if seconds else "-"


# ---------------------------------------------------------------- soak
def make_soak_tables(report: SoakReport) -> list[Table]:
    rows = [
        (
            f"{each.role}: {each.what}",
            f"{each.first:.1f}",
            f"{each.last:.1f}",
            _format_slope(each),
            _format_verdict(report, each),
        )
        for each in report.trends
    ]
    columns = ("", "first", "last", "slope per hour, second half (95 %)", "")
    unjudged = "" if report.judged else f"; slopes are judged from {MIN_JUDGED_SECONDS / 60:g} minutes on"
    return [_make_table(f"{report.rounds} rounds, {report.seconds / 60:.1f} minutes{unjudged}", columns, rows)]


def _format_slope(trend: Trend) -> str:
    slope = trend.slope
    return "-" if slope is None else f"{slope.value:+.2f} ({slope.low:+.2f} to {slope.high:+.2f})"


def _format_verdict(report: SoakReport, trend: Trend) -> str:
    if not report.judged or not trend.judged:
        return "not judged"
    return f"grows by more than {trend.bound:g}" if trend.grows else "stable"


def soak_as_json(report: SoakReport) -> dict[str, Any]:
    return {
        "seed": report.plan.seed,
        "seconds": report.seconds,
        "rounds": report.rounds,
        "texts_compared": report.exact,
        "slopes_judged": report.judged,
        "trends": [asdict(each) | {"grows": each.grows} for each in report.trends],
        **tally_as_json(report.tally),
    }
