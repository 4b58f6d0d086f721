"""tools.bench.growth measures times, counts calls that must not grow, and writes tables, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.models.config import load_config
from server.models.files.directory import locate
from tools.bench.growth import counts, times
from tools.bench.growth.__main__ import as_text, main
from tools.bench.growth.counts import count_calls
from tools.bench.growth.plot import GrowthPoint


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
    assert {point.size for point in points if point.part == "waiting"} == set(counts.WAITING)
    for what in {point.metric for point in points} - {"calls to take in line"}:
        values = {point.size: point.value for point in points if point.metric == what}
        assert max(values.values()) <= 1.5 * values[min(values)], what
        assert values[10_000] == values[1000] > 0, what
    line = [point.value for point in points if point.metric == "calls to take in line"]
    assert line[-1] <= line[0] + 30, "one comparison for each doubling"
    assert "| 10,000 |" in capsys.readouterr().out


def test_times_of_each_strategy_have_what_the_machine_allows_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(times, "STEPS", 4)
    monkeypatch.setattr(times, "CONTEXTS", (16, 400))
    monkeypatch.setattr(times, "SEQUENCES", (1, 2))
    monkeypatch.setattr(times, "SEQUENCE_CONTEXT", 100)
    monkeypatch.setattr(times, "measure_bandwidth", lambda size, threads: 1e9)
    file, plot = tmp_path / "it.json", tmp_path / "it.svg"
    flags = ["--part", "context", "sequences", "--max-size", "400", "--dtype", "float32", "--kv-memory", "64MiB"]
    assert main([*flags, "--json", str(file), "--plot", str(plot)]) == 0
    points = [GrowthPoint(**point) for point in json.loads(file.read_text())]
    found = {(point.part, point.size, point.strategy): point for point in points}
    strategies = ["paged", "contiguous", "sliding_window", "compressed", "int8", "mirrored", "quest", "streaming"]
    sizes = [("context", 16), ("context", 400), ("sequences", 1), ("sequences", 2)]
    assert set(found) == {(*size, strategy) for size in sizes for strategy in strategies}
    assert all(point.value > 0 for point in points)

    short = found["context", 16, "paged"]
    assert short.bound == short.value, "the shortest text is what others are held against"
    c = load_config(locate("tiny", None))
    token = c.num_layers * 2 * c.num_kv_heads * c.head_dim * 4
    assert found["context", 400, "paged"].bound == pytest.approx(short.value + 1e3 * 384 * token / 1e9)
    # A step after a compaction reads a quarter of 256 tokens, and the tokens since the boundary.
    gap = short.value + 1e3 * (64 + 144 - 16) * token / 1e9
    assert found["context", 400, "compressed"].bound == pytest.approx(gap, rel=0.05)
    assert "context: ms a step (the machine allows)" in capsys.readouterr().out
    assert plot.read_text().rstrip().endswith("</svg>")


def test_what_memory_has_no_room_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "SEQUENCES", (1, 8))
    monkeypatch.setattr(times, "SEQUENCE_CONTEXT", 400)
    settings = {"model": "tiny", "dtype": "float32", "kv_memory": "20MiB"}
    points = list(times.measure_by_sequences(settings, 8))
    assert {point.size for point in points if point.strategy == "paged"} == {1, 8}
    assert {point.size for point in points if point.strategy == "mirrored"} == {1}


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
