"""A table of a trace, against sums made by hand."""

from __future__ import annotations

import json

import pytest

from server.engine.profiling.trace_table import make_table


def span(name: str, ts: float, dur: float, tid: int | str = 1, **more: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": "cpu_op", "ts": ts, "dur": dur, "pid": 7, "tid": tid} | more


def test_time_within_belongs_to_who_is_within() -> None:
    events = [
        span("inner", 12, 3),
        span("outer", 10, 20),
        span("inner", 20, 5),
        span("innermost", 21, 1),
        span("outer", 30, 10),  # begins where the first one ends
        span("inner", 11, 50, tid=2),  # another thread
        span("kernel", 0, 4, tid="stream 7", pid="gpu", cat="kernel"),
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {}},
        {"ph": "f", "name": "ac2g", "ts": 1.0, "pid": 7, "tid": 0, "id": 5},
    ]
    table = make_table(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode())
    found = {row["name"]: (row["kind"], row["calls"], row["seconds"], row["own_seconds"]) for row in table}
    assert found == {
        "outer": ("cpu_op", 2, pytest.approx(30e-6), pytest.approx(22e-6)),
        "inner": ("cpu_op", 3, pytest.approx(58e-6), pytest.approx(57e-6)),
        "innermost": ("cpu_op", 1, pytest.approx(1e-6), pytest.approx(1e-6)),
        "kernel": ("kernel", 1, pytest.approx(4e-6), pytest.approx(4e-6)),
    }
    assert [row["name"] for row in table] == ["inner", "outer", "kernel", "innermost"]


def test_an_empty_trace() -> None:
    assert make_table(b'{"traceEvents": []}') == []
