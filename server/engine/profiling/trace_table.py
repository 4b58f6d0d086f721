"""Makes a table of a chrome trace: calls and time by name. Reads events with a duration (phase X), whatever wrote them.

torch's own table takes minutes of Python for a large trace, and would slow down the steps meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec

MAX_ROWS = 60
TIMESTAMP_TOLERANCE = 1e-3  # microseconds by which a nested span may end after the span around it


class TraceSpan(msgspec.Struct):
    """An event of the trace; only events of phase X (`ph`) have a duration."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0  # start, in microseconds
    dur: float = 0.0  # duration, in microseconds
    pid: int | str = 0
    tid: int | str = 0


class Trace(msgspec.Struct):
    """A chrome trace; only the members that are needed are decoded."""

    traceEvents: list[TraceSpan]


class TraceRow:
    """The number of calls and the times of all events with one name and category."""

    def __init__(self) -> None:
        self.calls = 0
        self.total_time = 0.0  # microseconds, nested events included
        self.self_time = 0.0  # microseconds, nested events excluded


def make_table(trace: bytes) -> list[dict[str, Any]]:
    """Return rows for the names with most self time: calls, total and own seconds. Raises DecodeError for bad JSON."""
    spans = [s for s in msgspec.json.decode(trace, type=Trace).traceEvents if s.ph == "X"]
    spans.sort(key=lambda s: (str(s.pid), str(s.tid), s.ts, -s.dur))
    rows: defaultdict[tuple[str, str], TraceRow] = defaultdict(TraceRow)
    for _, of_thread in groupby(spans, key=lambda s: (s.pid, s.tid)):
        _add_spans(of_thread, rows)
    longest = sorted(rows.items(), key=lambda each: -each[1].self_time)[:MAX_ROWS]
    return [
        {
            "name": name,
            "kind": kind,
            "calls": row.calls,
            "seconds": row.total_time / 1e6,
            "own_seconds": row.self_time / 1e6,
        }
        for (name, kind), row in longest
    ]


def _add_spans(spans: Iterable[TraceSpan], rows: defaultdict[tuple[str, str], TraceRow]) -> None:
    """Add the spans of a thread, sorted by start time, to the rows of the table."""
    around: list[tuple[float, TraceRow]] = []  # (end, row) of each span in which the next one may be nested
    for span in spans:
        while around and around[-1][0] <= span.ts + TIMESTAMP_TOLERANCE:
            around.pop()
        row = rows[span.name, span.cat]
        row.calls += 1
        row.total_time += span.dur
        row.self_time += span.dur
        if around:
            around[-1][1].self_time -= span.dur
        around.append((span.ts + span.dur, row))
