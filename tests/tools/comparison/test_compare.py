"""A small comparison with a real server and a real Prometheus, whose figures are known from the load."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.metrics.prometheus_server import tool
from tests.tools.comparison.test_memory import TOKEN_BYTES
from tools.comparison import __main__ as command
from tools.comparison.figures import BY_NAME
from tools.comparison.measure import CellMeter
from tools.comparison.plan import Cell, Plan
from tools.comparison.results import CellResult, Comparison
from tools.server_process import RunError

SMALL = ["--strategies", "paged", "sliding_window:window=16", "--prompt-tokens", "24", "64", "--batch", "1", "2"]
SMALL += [
    "--max-tokens",
    "8",
    "--seconds",
    "1",
    "--rounds",
    "1",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-memory",
    "64MiB",
]


@pytest.mark.apart
@pytest.mark.timeout(240)
def test_a_comparison_has_prometheus_figures_of_every_cell(tmp_path: Path) -> None:
    tool("prometheus")
    out = tmp_path / "comparison"
    assert command.main([*SMALL, "--out", str(out)]) == 0
    results = json.loads((out / command.RESULTS).read_text())
    assert len(results["cells"]) == 8
    for cell in results["cells"]:
        check_counts(cell)
    assert results["exact"] == {"paged": True, "sliding_window-window16": False}
    assert [results["fidelity"][length].keys() for length in ("24", "64")] == [results["exact"].keys()] * 2
    page = (out / command.REPORT).read_text()
    assert "sliding_window-window16" in page
    assert "Incomplete" not in page
    assert "Missing:" not in page, "kvmux evaluate has run at both lengths"


def check_counts(cell: dict[str, Any]) -> None:
    """Compare figures with what is known of the load."""
    found, requests = cell["figures"], cell["requests"]
    assert not cell["errors"]
    assert found.keys() == BY_NAME.keys()
    assert found["tokens_per_second"] == pytest.approx(requests * 8 / cell["seconds"], rel=1e-3), cell
    assert found["preemptions"] == 0
    assert found["kv_memory"] is not None  # sampled once a second: a short load may be missed
    assert 0 < found["ttft_p50"] <= found["ttft_p95"]
    assert 0 < found["itl_p50"] < cell["seconds"]
    if cell["strategy"] == "paged" and cell["prompt_tokens"] == 64:
        # 32 of 64 tokens are common, one block: each request finds them, but those that came first
        hits = round(found["hit_rate"] * 64 * requests, 6)  # tokens: thirds of 0.5 are not exact
        assert 32 * (requests - cell["batch"]) <= hits <= 32 * requests
    else:
        assert not found["hit_rate"], "a ring shares nothing, and 12 tokens are no full block"


@pytest.mark.apart
@pytest.mark.timeout(240)
def test_an_interrupted_comparison_reports_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool("prometheus")
    measure, measured = CellMeter.measure, list[Cell]()

    def interrupt(self: CellMeter, cell: Cell) -> CellResult:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(cell)
        return measure(self, cell)

    monkeypatch.setattr(CellMeter, "measure", interrupt)
    assert command.main([*SMALL, "--out", str(tmp_path)]) == command.INTERRUPTED
    assert f"what was measured is in {tmp_path}" in capsys.readouterr().err
    assert "6 of 8 cells are not measured" in (tmp_path / command.REPORT).read_text()
    assert len(json.loads((tmp_path / command.RESULTS).read_text())["cells"]) == 2


@pytest.mark.apart
@pytest.mark.timeout(240)
def test_what_one_strategy_needs_does_not_concern_another(tmp_path: Path) -> None:
    tool("prometheus")
    sizes = ["--prompt-tokens", "64", "--batch", "1", "--kv-memory", "800KiB"]
    arguments = [*SMALL, "--strategies", "mirrored", "paged", *sizes, "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    results = json.loads((tmp_path / command.RESULTS).read_text())
    longest = 3 * (64 + 8 + 1) * TOKEN_BYTES  # the tokens of 2 KV heads, and of 4 query heads
    assert results["failures"].keys() == {"mirrored"}
    assert f"the minimum is kv_memory={longest}" in results["failures"]["mirrored"]
    assert [cell["strategy"] for cell in results["cells"]] == ["paged"]
    assert results["fidelity"]["64"].keys() == {"paged"}
    page = (tmp_path / command.REPORT).read_text()
    assert "The server of mirrored failed" in page
    assert f"the minimum is kv_memory={longest}" in page
    assert "1 of 2 cells are not measured" in page


@pytest.mark.apart
@pytest.mark.timeout(240)
def test_if_no_server_starts_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool("prometheus")
    arguments = ["--strategies", "paged", "contiguous", "--prompt-tokens", "1000000", "--out", str(tmp_path)]
    assert command.main(arguments) == command.USER_ERROR
    assert "max_seq_len is 1000065, but the model has" in capsys.readouterr().err
    assert not (tmp_path / command.REPORT).exists()


def test_a_failed_evaluation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(flags: Sequence[str], length: int) -> NoReturn:
        raise RunError("the output\nno room")

    monkeypatch.setattr(command, "evaluate", fail)
    results = Comparison(Plan(("paged",), (64,), (1,), 8, 1.0, 1, 0), 0.01)
    command.measure_fidelity(results, [], 64)
    assert results.fidelity_errors == {64: "no room"}
    assert results.fidelity == {64: {}}


# -------------------------------------------------------------------- the command
def test_without_prometheus_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.prometheus.UNPACKED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["--out", str(tmp_path / "x")]) == command.USER_ERROR
    assert "make prometheus" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "nothing"], "there is no instance 'nothing'"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--dtype", "float8"], "dtype"),
    ],
)
def test_wrong_settings_are_reported(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "find_tool", lambda name: name)
    assert command.main([*arguments, "--out", str(tmp_path / "x")]) == command.USER_ERROR
    assert message in capsys.readouterr().err


def test_a_server_has_the_settings_of_a_file_but_secrets_and_other_strategies(tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text(
        'api_keys = ["a-long-secret"]\nmax_num_batched_tokens = 64\npreset = "small"\n'
        '[strategies.mine]\nkind = "compressed"\n'
        'limit = "25%"\n'
        "scorer_options = {width = 3}\n"
    )
    parser = command.make_parser()
    setup = command.make_setup(parser.parse_args(["--config", str(file), "--strategies", "mine", "paged"]))
    mine = {"kind": "compressed", "floor": "0%", "limit": "25%", "scorer_options": {"width": 3}}
    text = setup.format_file("mine")
    assert "secret" not in text
    written = tomllib.loads(text)
    assert written["max_num_batched_tokens"] == 64
    assert "preset" not in written, "it would be an instance"
    assert written["strategies"] == {"mine": mine}
    assert written["default_strategy"] == "mine"
    assert tomllib.loads(setup.format_file("paged"))["strategies"].keys() == {"paged"}
