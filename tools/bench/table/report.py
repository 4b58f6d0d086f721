"""What `make bench` found, as tables for people and as JSON for programs. Knows figures; not how they were made."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from server.profiling.background_load import BUSY
from server.version import version
from tools.bench.table.goals import PEERS_DATE, PEERS_MACHINE
from tools.bench.table.runs import Measured

COLUMNS = ("work", "measured", "goal", "met", "best peer", "others", "limit", "of the limit")
ALIGNED = "|---|---:|---:|:---:|---:|---|---:|---:|"
MARK = "†"


@dataclass(frozen=True)
class Report:
    """One run."""

    date: datetime
    found: Sequence[Measured]


def as_text(report: Report) -> str:
    """A table in GitHub's Markdown for each model, and a heading."""
    names = dict.fromkeys(each.row.shape.name for each in report.found)
    tables = (_table(name, [each for each in report.found if each.row.shape.name == name]) for name in names)
    return "\n\n".join([_heading(report), *tables, *_notes(report.found)])


def _heading(report: Report) -> str:
    date = report.date.date().isoformat()
    return (
        f"kvmux {version()} on {date}: {processor()}, {psutil.cpu_count()} processors. Peers of {PEERS_DATE}: "
        f"{PEERS_MACHINE}."
    )


def _table(name: str, found: Sequence[Measured]) -> str:
    lines = [f"**{name}**", "", "| " + " | ".join(COLUMNS) + " |", ALIGNED]
    return "\n".join(lines + ["| " + " | ".join(_cells(each)) + " |" for each in found])


def _cells(each: Measured) -> Iterator[str]:
    row = each.row
    best, *others = [f"{name} {number(value)}" for name, value in row.peers.items()] or ["-"]
    yield f"{row.what}, {row.unit}"
    yield number(each.value) + (MARK if each.busy > BUSY else "")
    yield "-" if row.goal is None else number(row.goal)
    yield {True: "yes", False: "no", None: "-"}[each.met]
    yield best
    yield ", ".join(others) or "-"
    yield "-" if each.limit is None else number(each.limit)
    yield "-" if each.of_limit is None else f"{each.of_limit:.0%}"


def _notes(found: Sequence[Measured]) -> list[str]:
    disturbed = [each.busy for each in found if each.busy > BUSY]
    if not disturbed:
        return []
    return [
        f"{MARK} disturbed: other processes used up to {max(disturbed):.0%} of the machine in every attempt; "
        "these figures would be better without them."
    ]


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def as_json(report: Report) -> dict[str, Any]:
    return {
        "date": report.date.isoformat(timespec="seconds"),
        "version": version(),
        "machine": {"processor": processor(), "processors": psutil.cpu_count(), "system": platform.platform()},
        "peers": {"date": PEERS_DATE, "machine": PEERS_MACHINE},
        "rows": [_json(each) for each in report.found],
    }


def _json(each: Measured) -> dict[str, Any]:
    row = asdict(each.row)
    return {
        "model": row.pop("shape")["name"],
        **row,
        "unit": each.row.unit,
        "value": each.value,
        "met": each.met,
        "limit": each.limit,
        "of_the_limit": each.of_limit,
        "used_by_others": each.busy,
    }
