"""A profile accounts for all of a step, counts what must be read, and leaves the engine as it found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.selfcheck.op_db import OPS
from server.cli.main import main
from server.profiling.report import MachineLimits, StepProfile, as_text
from server.profiling.steps import (
    BOOKKEEPING,
    COMPACTION,
    LAYOUT,
    MODEL,
    SAMPLING,
    SCHEDULING,
    Steps,
    average_fastest,
    measure_decode,
    measure_prefill,
)
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt

HOST = {BOOKKEEPING, LAYOUT, MODEL, SAMPLING, SCHEDULING}
QUICK = ["--threads", "1", "--steps", "3", "--context", "20", "--kv-memory", "16MiB"]


def profile(capsys: pytest.CaptureFixture[str], file: Path, *more: str) -> tuple[str, Any]:
    """What is printed, and written."""
    assert main(["profile", *QUICK, "--json", str(file), *more]) == 0
    return capsys.readouterr().out, json.loads(file.read_text())


def test_all_of_a_step_is_accounted_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed, told = profile(capsys, tmp_path / "it.json", "--sequences", "1", "3", "--prefill", "50")
    assert [(each["sequences"], each["tokens"]) for each in told["steps"]] == [(1, 20), (3, 20), (0, 50)]
    names = {op.name for op in OPS}
    for each in told["steps"]:
        parts = {part["what"]: part for part in each["parts"]}
        assert parts.keys() - names == HOST
        assert parts.keys() & names >= {"attend", "sample"}
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
        assert sum(part["seconds"] for part in parts.values()) == pytest.approx(each["seconds"])
        assert all(part["seconds"] > 0 for part in parts.values())
        assert each["bytes"] == sum(part["bytes"] or 0 for part in parts.values())
        assert each["of_the_limit"] == max(filter(None, each["least_seconds"].values())) / each["seconds"]
    assert told["steps"][0]["least_seconds"]["products"] is None
    assert told["steps"][2]["least_seconds"]["products"] == pytest.approx(
        told["steps"][2]["products"] / told["limits"]["products"]
    )
    for title in ("1 sequence of 20 tokens", "3 sequences of 20 tokens", "50 tokens of a prompt"):
        assert title in printed


def test_the_engine_is_as_before(tiny: Path) -> None:
    driver, other = Driver(tiny), Driver(tiny)
    measure_decode(driver.engine, "paged", 2, 10, 3)
    measure_prefill(driver.engine, "paged", 10, 3)
    assert not driver.core.tracer.recorders
    assert not driver.core.busy
    heard, expected = (each.submit("it", random_prompt(30), 6) for each in (driver, other))
    driver.run()
    other.run()
    assert heard.tokens == expected.tokens
    assert driver.core.timing_interval == other.core.timing_interval


def test_compactions_are_a_part_of_their_own(tiny: Path) -> None:
    small = {"kind": "compressed", "budget": 6, "every": 1, "sinks": 1, "recent": 1}  # a compaction in every step
    steps = measure_decode(Driver(tiny, strategies=strategies(small=small)).engine, "small", 2, 10, 3)
    assert steps.seconds.keys() >= HOST | {COMPACTION, "copy_tokens"}
    assert steps.seconds[COMPACTION] > 0
    assert steps.calls["copy_tokens"] > 0


def test_products_are_those_of_the_matrices(tiny: Path) -> None:
    model = Driver(tiny).core.model
    matrices = [t for layer in model._layers.layers for t in layer.tensors() if len(t.shape) == 2]  # type: ignore[attr-defined]
    head = model.info.vocab_size * model.config.hidden_size  # type: ignore[attr-defined]
    assert model.count_flops(7, 2) == 2 * (7 * sum(m.shape.numel() for m in matrices) + 2 * head)


def test_the_quickest_steps_count() -> None:
    steps = [{"a": seconds, "b": 1.0} for seconds in (9.0, 2.0, 3.0, 100.0, 8.0, 7.0)]
    assert average_fastest(steps) == {"a": 2.5, "b": 1.0}
    assert average_fastest([{"a": 1.0}]) == {"a": 1.0}


def test_a_table_adds_up() -> None:
    steps = Steps(2, 128, {"attend": 3e-3, BOOKKEEPING: 1e-3}, {"attend": 4}, {"attend": 6_000_000}, 10**9)
    profile = StepProfile(steps, MachineLimits(3e9, 1e12, 2))
    assert [(part.what, pytest.approx(part.seconds)) for part in profile.parts] == [
        ("attend", 3e-3),
        (BOOKKEEPING, 1e-3),
    ]
    assert profile.min_seconds == 2e-3, "products do not bound decoding"
    model = dict.fromkeys(("model", "dtype", "weights", "kv_cache", "kernels"), "x")
    text = as_text(model, [profile], "a note")
    assert "a note" in text
    assert "75.0%" in text
    assert "2.0" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--kv-cache", "none"],
            "--kv-cache: no instance is named 'none'; there are paged, contiguous, sliding_window",
        ),
        (["--sequences", "65"], "--sequences: at most 64"),
        (["--context", "9000"], "--context: must be from 1 to"),
        (["--model", "nowhere"], "nowhere"),
        (["--seconds", "3"], "--seconds: for a running server only; give its --url"),
        (["--trace", "it.json"], "--trace: for a running server only; give its --url"),
        (["--json", "nowhere/at/all.json"], "--json: cannot write"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *QUICK, *arguments]) == 2
    assert told in capsys.readouterr().err


def test_what_is_no_number_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "--sequences", "0"])
    assert "'0' is not a whole number above 0" in capsys.readouterr().err
