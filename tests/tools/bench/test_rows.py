"""Rows of `make bench` become the figures they are about, and limits are plain arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.registry import BUILTIN
from config.settings import load_settings
from loadtest.bench.workloads import NAMED_WORKLOADS
from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import __main__ as command
from tools.bench import peers, rows
from tools.bench.goals import LOWER_IS_BETTER, ROWS, BenchmarkRow, make_transformers_row
from tools.bench.limits import GIB, WARM_WORKLOADS, WORKLOADS, Speeds, compute_limit
from tools.bench.long_contexts import SETTINGS_FILE, get_options
from tools.bench.models import QWEN
from tools.peers.programs import ServerNeeds

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
        room = load_settings(SETTINGS_FILE, {}).max_seq_len if each.has_long_context else rows.MAX_SEQ_LEN
        assert named.prompt_tokens + named.shared_tokens + named.max_tokens <= (room or 0)
        assert (each.phase or "") in named.phases
        better = sorted(each.peers.values(), reverse=each.measure not in LOWER_IS_BETTER)
        assert list(each.peers.values()) == better or each.measure == "ready", "the best peer stands first"


def test_peers_are_compared_in_the_rows_that_all_servers_have() -> None:
    for name in peers.WORKLOADS:
        found = peers.list_rows([name])
        assert found, name
        assert {(row.workload, row.weights, row.strategy) for row in found} == {(name, "auto", "paged")}
    assert {row.measure for row in peers.list_rows(["e8"])} == {"step", "output"}
    assert peers.compute_needs(["e1", "e16"]) == ServerNeeds(16, 16_384 + 64 + peers.SPARE_TOKENS)
    assert peers.compute_needs(["f"]) == ServerNeeds(1, 8192 + 256 + 8 + peers.SPARE_TOKENS)


def test_a_value_that_results_cannot_give_is_missing_for_a_reason() -> None:
    """An answer may come in one piece, as one of incomplete characters does: no time between tokens is known then."""
    whole = {"strategy": "paged", "phase": None, "itl_ms": None, "full_batch_itl_ms": None}
    for measure in ("decode", "slowdown", "step"):
        [reading] = rows.read_results([row(measure)], [whole], [whole], SPEEDS, KV)
        assert reading.value is None
        assert reading.reason
        assert reading.is_by_chance
    apart = {**whole, "itl_ms": {"mean": 4.0}, "full_batch_itl_ms": {"p50": 5.0}}
    found = [rows.compute_value(row(each), [apart], [apart]) for each in ("decode", "slowdown", "step")]
    assert found == [250.0, 1.0, 5.0]
    assert rows.compute_value(row("slowdown"), [apart]) is None, "workload a has no results"


# -------------------------------------------------------------------- the command
@pytest.mark.apart
def test_a_real_server_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [row("decode"), row("ready"), row("peak"), make_transformers_row("decode", SMALL_SHAPE, "decode")]
    monkeypatch.setattr(rows, "ROWS", [replace(each, shape=SMALL_SHAPE) for each in measured])
    monkeypatch.setattr(rows, "SHAPES", {SMALL_SHAPE.name: SMALL_SHAPE})
    monkeypatch.setattr(rows, "MAX_SEQ_LEN", 256)
    renewed: list[Path] = []
    renew = replace(rows.GROUP, update_more=lambda context: renewed.append(context.options.docs))
    monkeypatch.setattr(rows, "GROUP", renew)
    file, document = tmp_path / "it.json", tmp_path / rows.BENCHMARKS
    document.write_text(f"<!-- printed by {renew.command} -->\n<!-- end of {renew.command} -->")
    options = ["--rounds", "1", "--attempts", "1", "--models", str(folder)]
    assert command.main([*options, "--json", str(file), "--docs", str(tmp_path)]) == 0
    assert renewed == [tmp_path]
    found = {each["what"]: each for each in json.loads(file.read_text())["rows"]}
    assert [*found] == [each.what for each in measured], "in the order of the rows"
    assert found["decode"]["value"] > 0 < found["decode"]["limit"]
    assert found["ready"]["value"] > 0.1
    assert 0.05 < found["peak"]["value"] < 20
    theirs = found["decode, transformers (in process)"]
    assert theirs["value"] > 0 < theirs["limit"]
    assert capsys.readouterr().out.strip() in document.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--turns 0", "--turns"),
        ("--docs x --rows decode", "leave --rows out"),
        ("kernels --docs x", "leave --docs out"),
    ],
)
def test_options_that_do_not_fit_are_named(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert named in capsys.readouterr().err
