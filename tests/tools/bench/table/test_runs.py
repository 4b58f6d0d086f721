"""Rows become the figures they are about, limits are plain arithmetic, and a disturbed run is repeated and marked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.registry import BUILTIN
from config.settings import load_settings
from loadtest.bench.workloads import NAMED_WORKLOADS
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import __main__ as command
from tools.bench.table import runs
from tools.bench.table.documents import GROWTH, PROFILES, TABLES, replace_section
from tools.bench.table.goals import LOWER_IS_BETTER, ROWS, BenchmarkRow, make_transformers_row
from tools.bench.table.limits import GIB, WARM_WORKLOADS, WORKLOADS, Speeds, compute_limit
from tools.bench.table.long_contexts import SETTINGS_FILE, get_options
from tools.bench.table.models import QWEN
from tools.bench.table.report import DISTURBED_MARK, BenchmarkReport, as_json, as_text
from tools.bench.table.runs import MeasuredRow

SPEEDS = Speeds(30e9, 3e12)
KV = 1 << 29


def row(measure: Any, **more: Any) -> BenchmarkRow:
    return BenchmarkRow(**{"what": measure, "shape": QWEN, "group": "decode", "measure": measure, **more})


# -------------------------------------------------------------------- limits, goals
def test_limits_are_arithmetic() -> None:
    weights, kv = 987_922_432, 12_288
    assert compute_limit(row("decode"), SPEEDS, KV) == pytest.approx(30e9 / (weights + 192 * kv))
    assert compute_limit(row("output", workload="c8"), SPEEDS, KV) == pytest.approx(8 * 30e9 / (weights + 8 * 320 * kv))
    products = 2 * (987_922_432 // 2 - 151_936 * 896)
    attention = 2 * 2048 * 24 * 896  # for each token: half of 2,048 are seen, with 4 operations each
    assert compute_limit(row("prefill", workload="b"), SPEEDS, KV) == pytest.approx(3e12 / (products + attention))
    assert compute_limit(row("ttft"), SPEEDS, KV) == pytest.approx(1e3 * weights / 30e9), (
        "few tokens still read all weights"
    )
    assert compute_limit(row("slowdown", workload="b"), SPEEDS, KV) == pytest.approx(
        (weights + 192 * kv) / (weights + 2080 * kv)
    )
    assert compute_limit(row("peak"), SPEEDS, KV) == pytest.approx(weights / GIB + 0.5)
    assert compute_limit(row("ttft", workload="d", phase="cold"), SPEEDS, KV) is None


def test_a_step_of_long_contexts_reads_what_the_strategy_reads() -> None:
    weights, kv, context = 987_922_432, 12_288, 4096 + 32
    read = {
        "paged": context * kv,
        "int8": context * 24 * 2 * 2 * (64 + 4),
        "compressed": (4096 // 4 + 32) * kv,
        "quest": (context / 8 + context / 32) * kv,
        "streaming": (4 + 1024 + 32) * kv,
        "sliding_window": (4 + 512) * kv,
    }
    for strategy, stream in read.items():
        expected = 1e3 * (weights + 8 * stream) / SPEEDS.read_bandwidth
        each = row("step", group="e8", workload="e8", strategy=strategy)
        assert compute_limit(each, SPEEDS, KV) == pytest.approx(expected), strategy
    many = row("output", group="g", workload="g")
    slow = Speeds(1e15, 1e12)  # reads in no time
    assert compute_limit(many, slow, KV) == pytest.approx(1e12 / weights), "products of 128 rows take their time"


def test_a_found_prefix_is_attended_to_and_not_computed() -> None:
    products, seen = 2 * 256 * (987_922_432 // 2 - 151_936 * 896), 256 * (8192 + 128)
    expected = 1e3 * (products + 4 * seen * 24 * 896) / SPEEDS.flops_per_second
    assert compute_limit(row("ttft", workload="f", phase="warm"), SPEEDS, KV) == pytest.approx(expected)


def test_workloads_are_those_of_the_load_test() -> None:
    for name, work in WORKLOADS.items():
        named = NAMED_WORKLOADS[name]
        assert (work.streams, work.prompt_tokens, work.answer_tokens) == (
            named.arrivals.max_concurrency,
            named.shared_tokens + named.prompt_tokens,
            named.max_tokens,
        )
    for name, work in WARM_WORKLOADS.items():
        named = NAMED_WORKLOADS[name]
        assert (work.cached_tokens, work.prompt_tokens) == (named.shared_tokens, named.prompt_tokens)


def test_the_settings_of_long_contexts_are_those_of_the_server() -> None:
    """Options that the file leaves out would make the limits wrong without an error."""
    settings = load_settings(SETTINGS_FILE, {})
    for name, instance in settings.strategies.items():
        options = get_options(name)
        assert options["kind"] == instance.kind
        assert instance.options == {key: value for key, value in options.items() if key != "kind"}
    assert {each.strategy for each in ROWS if each.has_long_context} <= settings.strategies.keys()
    assert settings.max_num_seqs == max(WORKLOADS[each.workload].streams for each in ROWS if each.has_long_context)


def test_long_contexts_are_measured_under_everything_that_keeps_or_reads_less() -> None:
    """A new built-in kind, or another instance in the file, joins the rows."""
    settings = load_settings(SETTINGS_FILE, {})
    steps = {each.strategy for each in ROWS if (each.workload, each.measure) == ("e8", "step")}
    exact_kinds = {"paged", "contiguous", "mirrored"}  # without options they read all keys and values
    assert {settings.strategies[name].kind for name in steps} >= BUILTIN.keys() - exact_kinds
    assert settings.strategies.keys() - {"contiguous"} == steps
    for each in ROWS:
        if each.has_long_context:
            assert compute_limit(each, SPEEDS, KV) is not None, each.what


def test_every_row_can_be_measured() -> None:
    assert len({(each.shape.name, each.what) for each in ROWS}) == len(ROWS)
    for each in ROWS:
        named = NAMED_WORKLOADS[each.workload]
        room = load_settings(SETTINGS_FILE, {}).max_seq_len if each.has_long_context else runs.MAX_SEQ_LEN
        assert named.prompt_tokens + named.shared_tokens + named.max_tokens <= (room or 0)
        assert (each.phase or "") in named.phases
        better = sorted(each.peers.values(), reverse=each.measure not in LOWER_IS_BETTER)
        assert list(each.peers.values()) == better or each.measure == "ready", "the best peer stands first"


@pytest.mark.parametrize(("measure", "value", "met"), [("decode", 5, True), ("decode", 4, False), ("ttft", 4, True)])
def test_goals(measure: str, value: float, met: bool) -> None:
    assert row(measure, goal=5).meets_goal(value) is met
    assert row(measure).meets_goal(value) is None


# -------------------------------------------------------------------- telling it
def report(*found: MeasuredRow) -> BenchmarkReport:
    return BenchmarkReport(datetime(2026, 1, 2).astimezone(), found)


def test_a_table_says_what_was_met_and_what_was_disturbed() -> None:
    slow = MeasuredRow(row("decode", what="slow", goal=27, peers={"x": 30, "y": 20}), 15.0, 30.0, 0.2)
    quick = MeasuredRow(row("ttft", what="quick", goal=80), 40.0, 30.0, 0.0)
    text = as_text(report(slow, quick))
    assert f"| slow, tokens/s | 15.0{DISTURBED_MARK} | 27.0 | no | x 30.0 | y 20.0 | 30.0 | 50% |" in text
    assert "| quick, ms | 40.0 | 80.0 | yes | - | - | 30.0 | 75% |" in text
    assert "used up to 20% of the machine" in text
    assert "disturbed" not in as_text(report(quick))
    told = json.loads(json.dumps(as_json(report(slow))))["rows"][0]
    assert told["model"] == QWEN.name
    assert (told["value"], told["met"], told["of_the_limit"], told["used_by_others"]) == (15.0, False, 0.5, 0.2)


def test_a_document_gets_what_was_printed() -> None:
    document = f"before\n<!-- printed by {TABLES} -->\nold\n<!-- end of {TABLES} -->\nafter\n"
    new = replace_section(document, TABLES, r"a \1 table")
    assert new == document.replace("old", r"a \1 table")
    assert replace_section(new, TABLES, "old") == document
    with pytest.raises(ValueError, match="has no section"):
        replace_section("nothing", TABLES, "x")


@pytest.mark.parametrize(
    ("name", "mark"),
    [("benchmarks", TABLES), ("performance", GROWTH), *(("performance", p) for p in PROFILES.values())],
)
def test_committed_documents_have_their_places(name: str, mark: str) -> None:
    document = (Path(__file__).parents[4] / "docs" / "laboratory" / f"{name}.md").read_text()
    assert "here it is" in replace_section(document, mark, "here it is")


# -------------------------------------------------------------------- the command
@pytest.mark.apart
def test_a_real_server_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("decode"), row("ready"), row("peak"), make_transformers_row("decode", SMALL_SHAPE, "decode")]
    rows = [replace(each, shape=SMALL_SHAPE) for each in rows]
    monkeypatch.setattr(command, "ROWS", rows)
    monkeypatch.setattr(command, "SHAPES", {SMALL_SHAPE.name: SMALL_SHAPE})
    monkeypatch.setattr(runs, "MAX_SEQ_LEN", 256)
    file, document = tmp_path / "it.json", tmp_path / "benchmarks.md"
    document.write_text(f"<!-- printed by {TABLES} -->\n<!-- end of {TABLES} -->")
    renewed: list[Path] = []
    monkeypatch.setattr(command, "update_performance_doc", lambda docs, models, tell: renewed.append(docs))
    options = ["--rounds", "1", "--attempts", "1", "--models", str(folder), "--model", SMALL_SHAPE.name]
    assert command.main([*options, "--json", str(file), "--docs", str(tmp_path)]) == 0
    assert renewed == [tmp_path]
    told: list[Mapping[str, Any]] = json.loads(file.read_text())["rows"]
    found = {each["what"]: each for each in told}
    assert found["decode"]["value"] > 0 < found["decode"]["limit"]
    assert found["ready"]["value"] > 0.1
    assert 0.05 < found["peak"]["value"] < 20
    theirs = found["decode, transformers (in process)"]
    assert theirs["value"] > 0 < theirs["limit"]
    assert capsys.readouterr().out.strip() in document.read_text()
