"""Times of growing loads have their limits beside them, and calls that must not grow are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_strategies.registry import BUILTIN
from config.settings import load_settings
from server.models.config import load_config
from server.models.files.directory import locate
from tools.bench import growth
from tools.bench.__main__ import main
from tools.bench.counts import count_calls
from tools.bench.long_contexts import SETTINGS_FILE, compute_read_bytes
from tools.bench.models import ModelShape
from tools.bench.report import read_samples
from tools.bench.runner import Reading


def test_calls_are_counted_exactly() -> None:
    def twice() -> None:
        abs(-1)
        abs(-2)

    base = count_calls(lambda: None)
    assert count_calls(twice) == base + 2, "twice takes the empty function's place, and calls two in C"


STRATEGIES = ["paged", "contiguous", "sliding_window", "int8", "compressed", "quest", "streaming", "mirrored"]
FLAGS = ["--model", "tiny", "--dtype", "bfloat16", "--kv-memory", "64MiB", "--rounds", "2"]
TINY = ModelShape("tiny", "", "", 4, 256, 640, 4, 2, 2048, 2048, 5e5)


def test_times_of_each_strategy_have_what_the_machine_allows_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that reads 1 GB and multiplies 1 TFLOP in a second."""
    monkeypatch.setattr(growth, "STEPS", 5)
    monkeypatch.setattr(growth.SpeedProbe, "measure_bandwidth", lambda probe, size: 1e9)
    monkeypatch.setattr(growth.SpeedProbe, "measure_flops", lambda probe: 1e12)
    file, plot = tmp_path / "it.json", tmp_path / "it.svg"
    sizes = ["--contexts", "1280", "16", "--streams", "1", "3", "--stream-context", "640", "--max-size", "10"]
    parts = ["--part", "context", "streams", "waiting"]
    assert main(["growth", *FLAGS, *parts, *sizes, "--json", str(file), "--plot", str(plot)]) == 0
    found: dict[tuple[str, str, str], list[Reading]] = {}
    for each in read_samples(json.loads(file.read_text())):
        place = each.table.title, each.reading.row.what, each.variant
        found.setdefault(place, []).append(each.reading)
    loads = {("context", "16"): 16, ("context", "1,280"): 1280, ("streams", "1"): 640, ("streams", "3"): 640}
    times = [place for place in found if place[0] != "waiting"]
    titles = list(dict.fromkeys((title.removeprefix("tiny, "), size) for title, size, _ in times))
    assert titles == list(loads), "the shortest first"

    # What operations read is what a model of the strategies, made of their options alone, reads.
    config = load_config(locate("tiny", None))
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (TINY.layers, TINY.kv_heads, TINY.head_dim)
    for (part, size), context in loads.items():
        for strategy in STRATEGIES:
            streams = int(size) if part == "streams" else 1
            expected = TINY.weight_bytes("auto") + streams * compute_read_bytes(strategy, TINY, context + 1)
            turns = found[f"tiny, {part}", size, strategy]
            assert len(turns) == 2
            for turn in turns:
                assert (turn.value or 0) > 0
                assert turn.limit == pytest.approx(1e3 * expected / 1e9, rel=0.03), (part, size, strategy)
    calls = [found["waiting", "calls to schedule a step", size][0].value for size in ("0", "10")]
    assert 0 < (calls[0] or 0) <= (calls[1] or 0) < 1000, calls
    assert plot.read_text().rstrip().endswith("</svg>")


def test_every_built_in_kind_is_measured() -> None:
    settings = load_settings(SETTINGS_FILE, {})
    names = growth.list_strategies(settings)
    kinds = {settings.strategies[name].kind if name in settings.strategies else name for name in names}
    assert kinds == BUILTIN.keys()
    assert names[0] == settings.default_strategy


def test_steps_end_when_they_take_long() -> None:
    assert growth.repeat(lambda: 0.1, 15, 3, 1.5) == [0.1] * 15
    assert growth.repeat(lambda: 0.5, 15, 3, 1.5) == [0.5] * 3
    assert growth.repeat(lambda: 2.0, 15, 3, 1.5) == [2.0] * 3
