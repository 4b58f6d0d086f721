"""Servers are measured by turns with the same workloads, and a server that fails has its reason in the table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest.bench.arrivals import Closed
from loadtest.bench.workloads import NAMED_WORKLOADS, Drawn
from server.profiling.running import RunError
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench.peers import __main__ as command
from tools.bench.peers import measure, workloads
from tools.bench.peers.measure import PeerMeasurement, measure_decoding, measure_servers
from tools.bench.peers.report import PeerReport, as_json, as_text, format_cell
from tools.bench.peers.servers import prepare_kvmux
from tools.bench.peers.workloads import compute_needs, list_rows, run_workload
from tools.bench.table.documents import BENCHMARKS, replace_section
from tools.bench.table.goals import BenchmarkRow
from tools.bench.table.limits import Speeds
from tools.bench.table.report import DISTURBED_MARK
from tools.peers import installer as installing
from tools.peers import programs
from tools.peers.installer import Installer, InstallError
from tools.peers.programs import ServerNeeds, ServerProgram, StartCommand, run_program

FOUND_TOKENS = "kvmux_prefix_cache_hits_total"
SPEEDS = Speeds(20e9, 1e12)


def find_children() -> set[psutil.Process]:
    """Return the processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def ignore(text: str) -> None:
    """Take the place of a status line."""


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
    found = list(measure_servers(compared, ["a", "e8"], 2, told.append))
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
    assert len(ours) == 2 * 4, "each row in each turn"
    assert [each.turn for each in ours] == [1] * 4 + [2] * 4
    theirs = [each for each in found if each.server == "broken"]
    assert len(theirs) == len(ours)
    assert all(each.value is None and "no such model" in each.reason for each in theirs)
    started = [each for each in told if each.endswith("starting")]
    assert started == [
        f"turn {turn} of 2: {name}, starting"
        for turn, name in ((1, "kvmux"), (1, "broken"), (2, "broken"), (2, "kvmux"))
    ]
    assert find_children() <= others


@pytest.mark.apart
@pytest.mark.usefixtures("short")
def test_decoding_is_measured_on_running_servers_with_the_same_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, cached, ran = find_children(), [], []  # prompt tokens that were found, and the servers, of each run

    def observe(url: str, workload: str, name: str, **flags: Any) -> workloads.Results:
        results = run_workload(url, workload, name, **flags)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        cached.append(sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(FOUND_TOKENS)))
        ran.append(name)
        return results

    monkeypatch.setattr(measure, "run_workload", observe)
    ours = prepare_kvmux(folder / SMALL_SHAPE.name)
    compared = [
        ours,
        replace(ours, name="another kvmux"),
        fail("broken", "print('no such model'); raise SystemExit(3)"),
    ]
    found = list(measure_decoding(compared, ["e8", "f"], 2, ignore))
    assert {each.row.measure for each in found} == {"step"}, "only rows that do not depend on computing prompts"
    assert [(each.server, each.turn) for each in found if each.server != "broken"] == [
        ("kvmux", 1),
        ("another kvmux", 1),
        ("another kvmux", 2),
        ("kvmux", 2),
    ]
    assert ["no such model" in each.reason for each in found if each.server == "broken"] == [True]
    assert ran == ["kvmux", "another kvmux", *(each.server for each in found[1:])]
    assert cached[0] == cached[1] == 0
    assert min(cached[2:]) > 0
    assert find_children() <= others


@pytest.mark.apart
@pytest.mark.usefixtures("short")
def test_a_workload_has_an_end(folder: Path) -> None:
    with run_program(prepare_kvmux(folder / SMALL_SHAPE.name), compute_needs(["a", "e8"])) as server:
        assert {each["requests"] for each in run_workload(server.url, "e8", "kvmux")} == {8}
        with pytest.raises(RunError, match=r"more than 0\.01 seconds"):
            run_workload(server.url, "e8", "kvmux", timeout=0.01)
        assert server.cpu_seconds() > 0


@pytest.mark.apart
def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = find_children()  # of tests before
    monkeypatch.setattr(programs, "STOP_TIMEOUT", 0.5)
    monkeypatch.setattr(programs, "START_TIMEOUT", 3.0)
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(RunError, match="did not become ready"), run_program(fail("deaf", code), ServerNeeds(1, 8)):
        pass
    assert time.monotonic() - start < 30
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
def make_installer(folder: Path) -> Installer:
    return Installer(folder / "it", ["--extra"], ignore)


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    steps: list[list[str]] = []
    monkeypatch.setattr(Installer, "run", lambda self, step, command, env=None: steps.append(list(command)))
    return steps


def test_what_is_installed_is_kept_and_another_version_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, installer = record_steps(monkeypatch), make_installer(tmp_path)
    installed: list[str] = []

    def put(what: str) -> Callable[[Installer], None]:
        def step(each: Installer) -> None:
            installed.append(what)
            (each.folder / what).touch()

        return step

    installer.ensure(put("one"), "1.0")
    installer.ensure(put("again"), "1.0")
    assert installed == ["one"]
    installer.ensure(put("two"), "2.0")
    assert installed == ["one", "two"]
    assert not (tmp_path / "it" / "one").exists()
    assert [step[1:3] for step in steps] == [["-m", "venv"]] * 2


def test_an_installation_that_fails_is_done_again(tmp_path: Path) -> None:
    installer = make_installer(tmp_path)

    def fail_step(each: Installer) -> None:
        each.run("a step", [sys.executable, "-c", "print('out of luck'); raise SystemExit(1)"])

    for _ in range(2):
        with pytest.raises(InstallError, match=r"a step failed: .*out of luck"):
            installer.ensure(fail_step, "1.0")
        assert not (installer.folder / installing.MARK).exists()


def test_a_step_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "STEP_TIMEOUT", 0.2)
    installer = make_installer(tmp_path)
    installer.folder.mkdir()
    with pytest.raises(InstallError, match=r"sleeping took more than 0\.2 seconds"):
        installer.run("sleeping", [sys.executable, "-c", "import time; time.sleep(60)"])


def test_pip_gets_further_arguments_where_it_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, installer = record_steps(monkeypatch), make_installer(tmp_path)
    installer.pip("x", "install", "a")
    installer.pip("x", "uninstall", "a")
    assert [step[3:] for step in steps] == [["install", "a", "--extra"], ["uninstall", "a"]]


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
def test_the_command_reports_servers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(model: Path, installer: Installer) -> ServerProgram:
        raise InstallError(f"{installer.folder.name}: nothing there")

    monkeypatch.setattr(command, "PEERS", {"llama.cpp": refuse, "vllm": refuse})
    monkeypatch.setattr(command, "make_model", lambda shape, folder, show_status: folder)
    monkeypatch.setattr(command, "measure_servers", lambda programs, *rest: [measurement("kvmux")])
    document = tmp_path / "benchmarks.md"
    document.write_text(f"<!-- printed by {command.MARKED} -->\n<!-- end of {command.MARKED} -->")
    file = tmp_path / "it.json"
    assert command.main(["--docs", str(tmp_path), "--json", str(file), "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "- vllm could not be installed: vllm: nothing there" in printed
    assert printed.strip() in document.read_text()
    assert set(json.loads(file.read_text())["not_installed"]) == {"llama.cpp", "vllm"}


def test_an_interrupted_run_shows_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(programs: object, *rest: object) -> Iterator[PeerMeasurement]:
        yield measurement("kvmux")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "PEERS", {})
    monkeypatch.setattr(command, "make_model", lambda shape, folder, show_status: folder)
    monkeypatch.setattr(command, "measure_servers", interrupted)
    file = tmp_path / "it.json"
    assert command.main(["--peers", "--json", str(file), "--folder", str(tmp_path)]) == command.INTERRUPTED
    assert "- interrupted: some rows were not measured" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["measurements"]) == 1


def test_turns_of_an_earlier_run_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_again(programs: object, workloads: object, turns: int, show: object) -> Iterator[PeerMeasurement]:
        yield from (measurement(server, turn=turn) for turn in range(1, turns + 1) for server in ("kvmux", "vLLM"))

    monkeypatch.setattr(command, "PEERS", {})
    monkeypatch.setattr(command, "make_model", lambda shape, folder, show_status: folder)
    monkeypatch.setattr(command, "measure_servers", measure_again)
    files = [tmp_path / f"{i}.json" for i in range(2)]
    flags = ["--peers", "--rows", "e8", "--folder", str(tmp_path)]
    assert command.main([*flags, "--turns", "2", "--json", str(files[0])]) == 0
    assert command.main([*flags, "--turns", "3", "--earlier", str(files[0]), "--json", str(files[1])]) == 0
    told = json.loads(files[1].read_text())
    assert [each["turn"] for each in told["measurements"] if each["server"] == "vLLM"] == [1, 2, 3, 4, 5]
    assert "medians of 5 turns" in capsys.readouterr().out
    told["machine"]["processor"] = "another"
    files[1].write_text(json.dumps(told))
    assert command.main([*flags, "--earlier", str(files[1])]) == command.FAILED
    assert "measured on another" in capsys.readouterr().err


def test_the_committed_document_has_a_place_for_the_tables() -> None:
    document = (Path(__file__).parents[4] / "docs" / "laboratory" / BENCHMARKS).read_text()
    assert "here they are" in replace_section(document, command.MARKED, "here they are")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "nothing"],
        ["--turns", "0"],
        ["--decode-turns", "-1"],
        ["--docs", ".", "--rows", "e8"],
        ["--docs", ".", "--peers"],
    ],
)
def test_wrong_arguments_are_reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "make bench-peers: error" in capsys.readouterr().err
