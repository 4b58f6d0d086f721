"""Formats the results of `make bench` as Markdown tables and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from server.profiling.background_load import BUSY_THRESHOLD
from server.version import get_version
from tools.bench.table.goals import PEERS_DATE, PEERS_MACHINE
from tools.bench.table.runs import MeasuredRow

COLUMNS = ("work", "measured", "goal", "met", "best peer", "others", "limit", "of the limit")
ALIGNED = "|---|---:|---:|:---:|---:|---|---:|---:|"
DISTURBED_MARK = "†"


@dataclass(frozen=True)
class BenchmarkReport:
    """The results of one run of `make bench`."""

    date: datetime
    results: Sequence[MeasuredRow]


def as_text(report: BenchmarkReport) -> str:
    """Return a heading and, for each model, a table in GitHub's Markdown."""
    names = dict.fromkeys(each.row.shape.name for each in report.results)
    tables = (_format_table(name, [each for each in report.results if each.row.shape.name == name]) for name in names)
    return "\n\n".join([_format_heading(report), *tables, *_format_notes(report.results)])


def _format_heading(report: BenchmarkReport) -> str:
    date = report.date.date().isoformat()
    return (
        f"kvmux {get_version()} on {date}: {read_processor_name()}, {psutil.cpu_count()} processors. Peers of "
        f"{PEERS_DATE}: {PEERS_MACHINE}."
    )


def _format_table(name: str, results: Sequence[MeasuredRow]) -> str:
    lines = [f"**{name}**", "", "| " + " | ".join(COLUMNS) + " |", ALIGNED]
    return "\n".join(lines + ["| " + " | ".join(_format_cells(each)) + " |" for each in results])


def _format_cells(each: MeasuredRow) -> Iterator[str]:
    row = each.row
    best, *others = [f"{name} {format_number(value)}" for name, value in row.peers.items()] or ["-"]
    yield f"{row.what}, {row.unit}"
    yield format_number(each.value) + (DISTURBED_MARK if each.background_load > BUSY_THRESHOLD else "")
    yield "-" if row.goal is None else format_number(row.goal)
    yield {True: "yes", False: "no", None: "-"}[each.meets_goal]
    yield best
    yield ", ".join(others) or "-"
    yield "-" if each.limit is None else format_number(each.limit)
    yield "-" if each.limit_ratio is None else f"{each.limit_ratio:.0%}"


def _format_notes(results: Sequence[MeasuredRow]) -> list[str]:
    disturbed = [each.background_load for each in results if each.background_load > BUSY_THRESHOLD]
    if not disturbed:
        return []
    return [
        f"{DISTURBED_MARK} disturbed: other processes used up to {max(disturbed):.0%} of the machine in every attempt; "
        "without them these figures would be better."
    ]


def format_number(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def read_processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def as_json(report: BenchmarkReport) -> dict[str, Any]:
    return {
        "date": report.date.isoformat(timespec="seconds"),
        "version": get_version(),
        "machine": {
            "processor": read_processor_name(),
            "processors": psutil.cpu_count(),
            "system": platform.platform(),
        },
        "peers": {"date": PEERS_DATE, "machine": PEERS_MACHINE},
        "rows": [_result_to_dict(each) for each in report.results],
    }


def _result_to_dict(each: MeasuredRow) -> dict[str, Any]:
    row = asdict(each.row)
    return {
        "model": row.pop("shape")["name"],
        **row,
        "unit": each.row.unit,
        "value": each.value,
        "met": each.meets_goal,
        "limit": each.limit,
        "of_the_limit": each.limit_ratio,
        "used_by_others": each.background_load,
    }
