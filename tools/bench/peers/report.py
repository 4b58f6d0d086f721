"""Formats the measurements of servers as Markdown tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

import psutil

from server.profiling.background_load import BUSY_THRESHOLD
from tools.bench.peers.measure import PeerMeasurement
from tools.bench.peers.ratios import ENOUGH_TURNS, OURS, format_ratio, list_ratios, pair_turns, ratio_as_json
from tools.bench.peers.workloads import WORKLOADS, compute_needs, list_rows
from tools.bench.table.goals import LOWER_IS_BETTER, BenchmarkRow
from tools.bench.table.report import DISTURBED_MARK, format_number, read_processor_name
from tools.peers.programs import ServerProgram

NO_PORT = 0  # as shown in commands
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class PeerReport:
    """The measurements of one run of `make bench-peers`, and what was measured."""

    date: datetime
    turns: int
    workloads: Sequence[str]
    programs: Sequence[ServerProgram]
    missing: Mapping[str, str]  # reasons why servers could not be installed, by their names
    measurements: Sequence[PeerMeasurement]
    complete: bool = True  # False: it was interrupted

    def find(self, server: str, row: BenchmarkRow) -> list[PeerMeasurement]:
        return [each for each in self.measurements if each.server == server and each.row == row]

    @property
    def rows(self) -> list[BenchmarkRow]:
        return list({id(each.row): each.row for each in self.measurements}.values())

    @property
    def names(self) -> list[str]:
        return [*(program.name for program in self.programs), *self.missing]


def as_text(report: PeerReport) -> str:
    """Return a heading, tables of figures and ratios, notes and a table of the servers, in GitHub's Markdown."""
    tables = [_format_figures(report), *_format_ratios(report)]
    return "\n\n".join([_format_heading(report), *tables, *_format_notes(report), _format_servers(report)])


def _format_heading(report: PeerReport) -> str:
    fewest = min((len(report.find(name, row)) for row in report.rows for name in report.names), default=report.turns)
    several = f"{fewest} to {report.turns}" if 0 < fewest < report.turns else f"{report.turns}"
    turns = "one turn" if report.turns == 1 else f"medians of {several} turns"
    return (
        f"{report.date.date().isoformat()}: {read_processor_name()}, {psutil.cpu_count()} processors, {turns}. In "
        "brackets the share of the limit of the same minute; the column of limits has their median."
    )


def _format_figures(report: PeerReport) -> str:
    lines = ["| work | " + " | ".join(report.names) + " | limit |", "|---|" + "---:|" * (len(report.names) + 1)]
    for row in report.rows:
        limits = [each.limit for name in report.names for each in report.find(name, row) if each.limit is not None]
        cells = [format_cell(report.find(name, row)) for name in report.names]
        limit = format_number(median(limits)) if limits else "-"
        lines.append(" | ".join([f"| {row.what}, {row.unit}", *cells, f"{limit} |"]))
    return "\n".join(lines)


def _format_ratios(report: PeerReport) -> Iterator[str]:
    """Yield an introduction and a table of the ratios to all peers, if there are any."""
    peers = [name for name in report.names if name != OURS]
    found = {(each.peer, each.row.what): each for each in list_ratios(peers, report.rows, report.measurements)}
    peers = [name for name in peers if any(name == peer for peer, _ in found)]
    if not found:
        return
    yield _explain_ratios(max(len(each.ratios) for each in found.values()))
    lines = ["| times as fast as | " + " | ".join(peers) + " |", "|---|" + "---:|" * len(peers)]
    for row in report.rows:
        cells = [format_ratio(pair_turns(peer, row, report.measurements)) for peer in peers]
        lines.append(" | ".join([f"| {row.what}", *cells]) + " |")
    yield "\n".join(lines)


def _explain_ratios(turns: int) -> str:
    text = "How many times as fast kvmux is, the median of the ratios of the turns"
    if turns == 1:
        return f"{text}; one turn has no interval."
    text += ", and the interval that contains the true median with a probability of 95 % for any distribution"
    if turns >= ENOUGH_TURNS:
        return f"{text}."
    return f"{text}; of fewer than {ENOUGH_TURNS} turns it is the whole range, which contains it with the given one."


def format_cell(measurements: Sequence[PeerMeasurement]) -> str:
    """Return the median of a row's values on a server, with the median share of the limit; "-" if there are none."""
    measured = [each for each in measurements if each.value is not None]
    if not measured:
        return "-"
    values = [each.value for each in measured if each.value is not None]
    shares = [share for each in measured if (share := compute_share(each)) is not None]
    mark = DISTURBED_MARK if any(each.background_load > BUSY_THRESHOLD for each in measured) else ""
    return format_number(median(values)) + mark + (f" ({median(shares):.0%})" if shares else "")


def compute_share(each: PeerMeasurement) -> float | None:
    """Return the share of the limit that a measurement reached; None if it has no value or no limit."""
    if each.value is None or each.limit is None:
        return None
    return each.limit / each.value if each.row.measure in LOWER_IS_BETTER else each.value / each.limit


def _format_notes(report: PeerReport) -> list[str]:
    notes = [f"- {name} could not be installed: {_shorten(reason)}" for name, reason in report.missing.items()]
    if not report.complete:
        notes.append("- interrupted: some rows were not measured, or in fewer turns")
    # one workload has several rows, all of which have its reason
    reasons = {(each.server, each.row.workload, each.reason) for each in report.measurements if each.reason}
    notes += [f"- {server}, workload {work}: {_shorten(reason)}" for server, work, reason in sorted(reasons)]
    busiest = max((each.background_load for each in report.measurements), default=0.0)
    if busiest > BUSY_THRESHOLD:
        notes.append(f"- {DISTURBED_MARK} disturbed: other processes used up to {busiest:.0%} of the machine.")
    return ["\n".join(notes)] if notes else []


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + " ..."


def _format_servers(report: PeerReport) -> str:
    lines = ["| server | version | memory read before its workloads, GB/s | started with |", "|---|---|---:|---|"]
    for program in report.programs:
        alone = program.start_for_each_workload
        needs = compute_needs(report.workloads[-1:] if alone else report.workloads)
        command = program.make_command(needs, NO_PORT).describe().replace(f" --port {NO_PORT}", "")
        note = f" (for {report.workloads[-1]}; for others with their streams and lengths)" if alone else ""
        lines.append(
            f"| {program.name} | {program.version} | {_format_bandwidth(report, program)} | `{command}`{note} |"
        )
    return "\n".join(lines)


def _format_bandwidth(report: PeerReport, program: ServerProgram) -> str:
    found = [
        each.read_bandwidth / 1e9 for each in report.measurements if each.server == program.name and each.read_bandwidth
    ]
    return f"{min(found):.1f} to {max(found):.1f}" if found else "-"


def as_json(report: PeerReport) -> dict[str, Any]:
    return {
        "date": report.date.isoformat(timespec="seconds"),
        "machine": {"processor": read_processor_name(), "processors": psutil.cpu_count()},
        "servers": {program.name: program.version for program in report.programs},
        "not_installed": dict(report.missing),
        "measurements": [
            {
                "server": each.server,
                "turn": each.turn,
                "workload": each.row.workload,
                "what": each.row.what,
                "unit": each.row.unit,
                "value": each.value,
                "limit": each.limit,
                "read_bandwidth": each.read_bandwidth,
                "used_by_others": each.background_load,
                "reason": each.reason or None,
            }
            for each in report.measurements
        ],
        "ratios": [
            ratio_as_json(each)
            for each in list_ratios([name for name in report.names if name != OURS], report.rows, report.measurements)
        ],
    }


def read_measurements(report: Mapping[str, Any]) -> list[PeerMeasurement]:
    """Return the measurements of a report that `as_json` made, of the rows that there still are.

    Raises ValueError if it was made on another processor: its turns cannot be added to those of this one.
    """
    if (processor := report["machine"]["processor"]) != read_processor_name():
        raise ValueError(f"measured on {processor}, and this is {read_processor_name()}: leave the file out")
    rows = {(row.workload, row.what): row for row in list_rows(WORKLOADS)}
    return [
        PeerMeasurement(
            each["server"],
            rows[each["workload"], each["what"]],
            each["value"],
            each["limit"],
            each["read_bandwidth"],
            each["used_by_others"],
            each["reason"] or "",
            each.get("turn", 1),  # files from before there were turns have one
        )
        for each in report["measurements"]
        if (each["workload"], each["what"]) in rows
    ]
