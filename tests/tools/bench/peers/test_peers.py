"""Servers are measured by turns with the same workloads, and a server that fails has its reason in the table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.bench.arrivals import Closed
from loadtest.bench.workloads import NAMED_WORKLOADS, Drawn
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench.peers import __main__ as command
from tools.bench.peers import measure, workloads
from tools.bench.peers.measure import PeerMeasurement, measure_servers
from tools.bench.peers.report import PeerReport, as_json, as_text, format_cell
from tools.bench.peers.servers import prepare_kvmux
from tools.bench.peers.workloads import compute_needs, list_rows
from tools.bench.table.documents import BENCHMARKS, replace_section
from tools.bench.table.goals import BenchmarkRow
from tools.bench.table.limits import Speeds
from tools.bench.table.report import DISTURBED_MARK
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand

SPEEDS = Speeds(20e9, 1e12)


def find_children() -> set[psutil.Process]:
    """Return the processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with a context so short that the client shortens its workloads, and a machine that is not measured."""
    monkeypatch.setitem(NAMED_WORKLOADS, "e8", Drawn("e8", Closed(8), requests=8, prompt_tokens=40, max_tokens=12))
    monkeypatch.setitem(NAMED_WORKLOADS, "a", Drawn("a", Closed(1), requests=2, prompt_tokens=20, max_tokens=6))
    monkeypatch.setattr(measure, "measure_speeds", lambda row: SPEEDS)


def fail(name: str, code: str) -> ServerProgram:
    """Return a server that runs `code` in Python."""
    return ServerProgram(name, "1", "/health", lambda needs, port: StartCommand([sys.executable, "-c", code]))


@pytest.mark.apart
@pytest.mark.usefixtures("short")
def test_kvmux_is_measured_beside_a_server_that_does_not_start(folder: Path) -> None:
    others = find_children()  # of tests before
    compared = [prepare_kvmux(folder / SMALL_SHAPE.name), fail("broken", "print('no such model'); raise SystemExit(3)")]
    told: list[str] = []
    found = list(measure_servers(compared, ["a", "e8"], 1, told.append))
    ours = [each for each in found if each.server == "kvmux"]
    assert {(each.row.workload, each.row.measure) for each in ours} == {
        ("a", "decode"),
        ("a", "ttft"),
        ("e8", "step"),
        ("e8", "output"),
    }
    for each in ours:
        assert each.limit is not None
        if each.row.measure == "step" and each.value is None:  # the first of such short answers may end early
            assert each.reason == "its streams never all decoded at the same time"
        else:
            assert each.value is not None, each.reason
            assert each.value > 0
    assert [each.turn for each in ours] == [1] * 4
    theirs = [each for each in found if each.server == "broken"]
    assert len(theirs) == len(ours)
    assert all(each.value is None and "no such model" in each.reason for each in theirs)
    started = [each for each in told if each.endswith("starting")]
    assert started == [f"turn 1 of 1: {name}, starting" for name in ("kvmux", "broken")]
    assert find_children() <= others


# -------------------------------------------------------------------- rows and needs
def test_rows_are_those_of_make_bench_that_all_servers_have() -> None:
    for name in workloads.WORKLOADS:
        rows = list_rows([name])
        assert rows, name
        assert {(row.workload, row.weights, row.strategy) for row in rows} == {(name, "auto", "paged")}
    assert {row.measure for row in list_rows(["e8"])} == {"step", "output"}


def test_a_server_is_started_for_the_longest_and_the_widest() -> None:
    assert compute_needs(["e1", "e16"]) == ServerNeeds(16, 16_384 + 64 + workloads.SPARE_TOKENS)
    assert compute_needs(["f"]) == ServerNeeds(1, 8192 + 256 + 8 + workloads.SPARE_TOKENS)


def test_a_command_is_shown_without_folders_of_the_machine() -> None:
    shown = StartCommand(["/home/x/bin/serve", "--model", "/home/x/m"], {"LD_PRELOAD": "/a/b.so", "N": "2"}).describe()
    assert shown == "LD_PRELOAD=b.so N=2 serve --model m"


# -------------------------------------------------------------------- installing
# -------------------------------------------------------------------- the report
ROW = list_rows(["e8"])[0]


def measurement(server: str, row: BenchmarkRow = ROW, **more: Any) -> PeerMeasurement:
    return PeerMeasurement(
        **{"server": server, "row": row, "value": 80.0, "limit": 40.0, "read_bandwidth": 2e10} | more
    )


def make_report(*found: PeerMeasurement, missing: dict[str, str] | None = None) -> PeerReport:
    compared = [fail("kvmux", ""), replace(fail("llama.cpp", ""), start_for_each_workload=True)]
    return PeerReport(datetime(2026, 1, 2).astimezone(), 2, ["c8", "e8"], compared, missing or {}, found)


def test_a_cell_is_the_median_of_the_turns() -> None:
    assert format_cell([measurement("x", value=value) for value in (50.0, 80.0, 100.0)]) == "80.0 (50%)"
    assert format_cell([measurement("x", background_load=0.3)]) == f"80.0{DISTURBED_MARK} (50%)"
    assert format_cell([measurement("x", limit=None)]) == "80.0"
    assert format_cell([measurement("x", value=None), measurement("x")]) == "80.0 (50%)"
    assert format_cell([]) == format_cell([measurement("x", value=None)]) == "-"
    speed = next(row for row in list_rows(["e8"]) if row.measure == "output")
    assert format_cell([measurement("x", speed, value=10.0, limit=40.0)]) == "10.0 (25%)", "more is better"


def test_a_report_names_what_could_not_be_measured() -> None:
    found = [
        measurement("kvmux"),
        measurement("llama.cpp", value=None, limit=None, read_bandwidth=None, reason="slow\nonce"),
    ]
    text = as_text(make_report(*found, missing={"vLLM": "packages failed"}))
    assert "| work | kvmux | llama.cpp | vLLM | limit |" in text
    assert f"| {ROW.what}, ms | 80.0 (50%) | - | - | 40.0 |" in text
    assert "- vLLM could not be installed: packages failed" in text
    assert "- llama.cpp, workload e8: slow once" in text
    assert "| kvmux | 1 | 20.0 to 20.0 |" in text
    assert "disturbed" not in text
    told = json.loads(json.dumps(as_json(make_report(*found))))
    assert [(each["server"], each["value"]) for each in told["measurements"]] == [("kvmux", 80.0), ("llama.cpp", None)]


# -------------------------------------------------------------------- the command
def test_the_committed_document_has_a_place_for_the_tables() -> None:
    document = (Path(__file__).parents[4] / "docs" / "laboratory" / BENCHMARKS).read_text()
    assert "here they are" in replace_section(document, command.MARKED, "here they are")
