"""tools.bench.growth measures times, counts calls that must not grow, and writes tables, JSON and plots."""

from __future__ import annotations

import json
import random
import statistics
from datetime import datetime
from pathlib import Path

import pytest

from cache_strategies.registry import BUILTIN
from config.settings import load_settings
from server.models.config import load_config
from server.models.files.directory import locate
from tools.bench.growth import times
from tools.bench.growth.__main__ import as_text, main
from tools.bench.growth.counts import count_calls
from tools.bench.growth.points import GrowthPoint, StepRound, as_json, read_points, summarize
from tools.bench.table.long_contexts import SETTINGS_FILE, compute_read_bytes
from tools.bench.table.models import ModelShape


def test_calls_are_counted_exactly() -> None:
    def twice() -> None:
        abs(-1)
        abs(-2)

    base = count_calls(lambda: None)
    assert count_calls(twice) == base + 2, "twice takes the empty function's place, and calls two in C"


STRATEGIES = ["paged", "contiguous", "sliding_window", "int8", "compressed", "quest", "streaming", "mirrored"]
FLAGS = ["--model", "tiny", "--dtype", "bfloat16", "--kv-memory", "64MiB", "--rounds", "2"]
TINY = ModelShape("tiny", "", "", 4, 256, 640, 4, 2, 2048, 2048, 5e5)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, on a machine that reads 1 GB and multiplies 1 TFLOP in a second."""
    monkeypatch.setattr(times, "STEPS", 5)
    monkeypatch.setattr(times.SpeedProbe, "measure_bandwidth", lambda probe, size: 1e9)
    monkeypatch.setattr(times.SpeedProbe, "measure_flops", lambda probe: 1e12)


@pytest.mark.usefixtures("short")
def test_times_of_each_strategy_have_what_the_machine_allows_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "it.json", tmp_path / "it.svg"
    sizes = ["--contexts", "1280", "16", "--streams", "1", "3", "--stream-context", "640"]
    assert main([*FLAGS, "--part", "context", "streams", *sizes, "--json", str(file), "--plot", str(plot)]) == 0
    points = read_points(json.loads(file.read_text()))
    found = {(point.part, point.size, point.strategy): point for point in points}
    loads = {("context", 16): 16, ("context", 1280): 1280, ("streams", 1): 640, ("streams", 3): 640}
    assert list(dict.fromkeys((point.part, point.size) for point in points)) == list(loads), "the shortest first"
    assert set(found) == {(*load, strategy) for load in loads for strategy in STRATEGIES}
    assert all(point.value > 0 and len(point.rounds) == 2 and point.model == "tiny" for point in points)

    # What operations read is what a model of the strategies, made of their options alone, reads.
    config = load_config(locate("tiny", None))
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (TINY.layers, TINY.kv_heads, TINY.head_dim)
    for (part, size), context in loads.items():
        for strategy in STRATEGIES:
            streams = size if part == "streams" else 1
            expected = TINY.weight_bytes("auto") + streams * compute_read_bytes(strategy, TINY, context + 1)
            read = found[part, size, strategy].rounds[0].read_bytes
            assert read == pytest.approx(expected, rel=0.03), (part, size, strategy)
            assert found[part, size, strategy].limit == pytest.approx(1e3 * read / 1e9)
    printed = capsys.readouterr().out
    assert "tiny, context: ms a step (the machine allows, share)" in printed
    assert "| 1,280 |" in printed
    assert plot.read_text().rstrip().endswith("</svg>")


def test_every_built_in_kind_is_measured() -> None:
    settings = load_settings(SETTINGS_FILE, {})
    names = times.list_strategies(settings)
    kinds = {settings.strategies[name].kind if name in settings.strategies else name for name in names}
    assert kinds == BUILTIN.keys()
    assert names[0] == settings.default_strategy


def test_steps_end_when_they_take_long() -> None:
    assert times.repeat(lambda: 0.1, 15, 3, 1.5) == [0.1] * 15
    assert times.repeat(lambda: 0.5, 15, 3, 1.5) == [0.5] * 3
    assert times.repeat(lambda: 2.0, 15, 3, 1.5) == [2.0] * 3


def test_a_point_is_the_median_of_its_rounds() -> None:
    rounds = [
        StepRound(random.uniform(1, 2), random.randint(1, 9), 10.0, random.randint(1, 99), 100.0) for _ in range(5)
    ]
    point = summarize("context", 7, "paged", "m", rounds)
    assert point.value == pytest.approx(statistics.median(1e3 * each.seconds for each in rounds))
    limits = sorted(1e3 * max(each.read_bytes / 10, (each.flops or 0) / 100) for each in rounds)
    assert point.limit == pytest.approx(limits[2])
    assert StepRound(1, 20, 10.0, None, 100.0).limit_seconds == 2, "products are not known of every model"
    assert read_points(json.loads(json.dumps(as_json([point], datetime.now().astimezone())))) == [point]


def make_points(model: str, *strategies: str) -> list[GrowthPoint]:
    rounds = [StepRound(0.002, 10**6, 1e9, None, 1e12), StepRound(0.003, 10**6, 1e9, None, 1e12)]
    return [
        summarize(part, size, name, model, rounds)
        for part, sizes in (("context", (128, 32_000)), ("streams", (1, 128)))
        for size in sizes
        for name in strategies
    ]


def test_a_table_has_a_column_for_each_kind() -> None:
    points = [GrowthPoint("waiting", at, what, at + len(what)) for at in (0, 10) for what in ("a", "bb")]
    assert as_text(points).splitlines() == [
        "| waiting | a | bb |",
        "|---:|---:|---:|",
        "| 0 | 1 | 2 |",
        "| 10 | 11 | 12 |",
    ]


def test_a_time_has_the_limit_and_the_share_beside_it() -> None:
    assert "| 128 | 2.50 (1.00, 40%) |" in as_text(make_points("m", "paged"))
