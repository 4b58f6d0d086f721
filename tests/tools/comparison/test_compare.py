"""A small comparison with a real server and a real Prometheus, which gives the report's figures once more."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.metrics.prometheus_server import tool
from tools.comparison import __main__ as command
from tools.comparison.figures import BY_NAME
from tools.comparison.measure import CellMeter
from tools.comparison.plan import Cell
from tools.comparison.record import CELLS, CellResult, Record
from tools.prometheus import Prometheus, make_config, run_prometheus

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
def test_a_comparison_is_interrupted_goes_on_and_has_prometheus_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool("prometheus")
    out = tmp_path / "comparison"
    arguments = [*SMALL, "--out", str(out)]
    measure, measured = CellMeter.measure, list[Cell]()

    def interrupt(self: CellMeter, cell: Cell) -> CellResult:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell)
        return measure(self, cell)

    with monkeypatch.context() as patch:
        patch.setattr(CellMeter, "measure", interrupt)
        assert command.main(arguments) == command.INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    assert len((out / CELLS).read_text().splitlines()) == 3

    with monkeypatch.context() as patch:
        patch.setattr(CellMeter, "measure", lambda self, cell: measured.append(cell) or measure(self, cell))
        assert command.main(arguments) == 0
    assert len(measured) == len(set(measured)) == 8, "no cell was measured again"

    record = Record.open(out, json.loads((out / "plan.json").read_text()), restart=False)
    check_counts(record)
    with run_prometheus(out / "prometheus", make_config("127.0.0.1:1", "1h")) as prometheus:
        check_answers(prometheus, record)
    page = (out / command.REPORT).read_text()
    assert "sliding_window-window16" in page
    assert "Incomplete" not in page
    assert "Missing:" not in page, "kvmux evaluate has run at both lengths"


def check_counts(record: Record) -> None:
    """Compare figures with what is known of the load."""
    for cell, result in record.results.items():
        found = {name: reading.value for name, reading in result.figures.items()}
        assert not result.errors
        tokens, seconds = result.requests * 8, result.interval.seconds
        assert found["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3), cell
        assert found["preemptions"] == 0
        assert found["kv_memory"] is not None
        assert found["itl_p50"] is not None
        assert found["itl_p50"] < seconds
        if cell.strategy == "paged" and cell.load.prompt_tokens == 64:
            # 32 of 64 tokens are common, one block: each request finds them, but those that came first
            assert found["hit_rate"] is not None
            hits = round(found["hit_rate"] * 64 * result.requests, 6)  # tokens: thirds of 0.5 are not exact
            assert 32 * (result.requests - cell.load.batch) <= hits <= 32 * result.requests
        else:
            assert not found["hit_rate"], "a ring shares nothing, and 12 tokens are no full block"


def check_answers(prometheus: Prometheus, record: Record) -> None:
    """Ask a Prometheus with the same data every query once more."""
    asked = 0
    for result in record.results.values():
        for name, reading in result.figures.items():
            values = [
                v for _, v in Prometheus(prometheus.client, reading.time).query(reading.query) if math.isfinite(v)
            ]
            assert (values[0] if values else None) == reading.value, (BY_NAME[name].title, reading)
            asked += reading.value is not None
    assert asked >= 8 * (len(BY_NAME) - 1)


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


def test_settings_of_a_file_are_used_but_secrets(tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    file.write_text(
        'api_keys = ["a-long-secret"]\nmax_num_batched_tokens = 64\n[strategies.mine]\nkind = "compressed"\n'
        'limit = "25%"\n'
        "scorer_options = {width = 3}\n"
    )
    parser = command.make_parser()
    setup = command.make_setup(parser.parse_args(["--config", str(file), "--strategies", "mine", "paged"]))
    mine = {"kind": "compressed", "floor": "0%", "limit": "25%", "scorer_options": {"width": 3}}
    assert setup.instances()["mine"] == mine
    text = command.format_settings(setup.server_settings())
    assert "max_num_batched_tokens = 64" in text
    assert "secret" not in text
    assert 'default_strategy = "mine"' in text
