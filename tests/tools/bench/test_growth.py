"""tools.bench.growth measures times, counts calls that must not grow, and writes tables, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.models.config import load_config
from server.models.files.directory import locate
from tools.bench import growth
from tools.bench.growth import GrowthPoint, as_text, count_calls, main


def test_calls_are_counted_exactly() -> None:
    def twice() -> None:
        abs(-1)
        abs(-2)

    base = count_calls(lambda: None)
    assert count_calls(twice) == base + 2, "twice takes the empty function's place, and calls two in C"


def test_counts_stay_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "it.json"
    assert main(["--part", "waiting", "blocks", "--max-size", "10000", "--json", str(file)]) == 0
    points = [GrowthPoint(**point) for point in json.loads(file.read_text())]
    assert {point.size for point in points if point.part == "blocks"} == {1000, 10_000}
    assert {point.size for point in points if point.part == "waiting"} == set(growth.WAITING)
    for what in {point.metric for point in points} - {"calls to take in line"}:
        values = {point.size: point.value for point in points if point.metric == what}
        assert max(values.values()) <= 1.5 * values[min(values)], what
        assert values[10_000] == values[1000] > 0, what
    line = [point.value for point in points if point.metric == "calls to take in line"]
    assert line[-1] <= line[0] + 30, "one comparison for each doubling"
    assert "| 10,000 |" in capsys.readouterr().out


def test_times_have_what_the_machine_allows_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "STEPS", 4)
    monkeypatch.setattr(growth, "CONTEXTS", (16, 64))
    monkeypatch.setattr(growth, "measure_bandwidth", lambda size, threads: 1e9)
    file, plot = tmp_path / "it.json", tmp_path / "it.svg"
    flags = [
        "--part",
        "context",
        "sequences",
        "--max-size",
        "64",
        "--dtype",
        "float32",
        "--json",
        str(file),
        "--plot",
        str(plot),
    ]
    monkeypatch.setattr(growth, "SEQUENCES", (1, 2))
    assert main(flags) == 0
    short, long, one, two = (GrowthPoint(**point) for point in json.loads(file.read_text()))
    assert short.bound == short.value, "the shortest text is what others are held against"
    c = load_config(locate("tiny", None))
    token = c.num_layers * 2 * c.num_kv_heads * c.head_dim * 4
    assert long.bound == pytest.approx(short.value + 1e3 * 48 * token / 1e9)
    assert (one.size, two.size) == (1, 2)
    assert one.value > 0 < two.value
    assert "the machine allows" in capsys.readouterr().out
    assert plot.read_text().rstrip().endswith("</svg>")


def test_a_table_has_a_column_for_each_kind() -> None:
    points = [GrowthPoint("waiting", at, what, at + len(what)) for at in (0, 10) for what in ("a", "bb")]
    assert as_text(points).splitlines() == [
        "| waiting | a | bb |",
        "|---:|---:|---:|",
        "| 0 | 1 | 2 |",
        "| 10 | 11 | 12 |",
    ]


def test_bad_arguments_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--part", "context", "--model", "nowhere"])
    assert "nowhere" in capsys.readouterr().err
