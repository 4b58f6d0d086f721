"""The step benchmark accounts for all of a step, and leaves the engine as it found it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kernels.table import OPS
from server import bench_step
from server.bench_step import REST, Stopwatch, measure
from tests.engine.driving import Driver
from tests.engine.reference import random_prompt


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "STEPS", 3)


def test_shares_are_of_the_whole_step(capsys: pytest.CaptureFixture[str]) -> None:
    bench_step.main(
        ["--json", "--threads", "1", "--sequences", "1", "3", "--context", "20", "--kv-cache", "contiguous"]
    )
    by_sequences: dict[int, list[Any]] = defaultdict(list)
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        by_sequences[row["sequences"]].append(row)
    assert [*by_sequences] == [1, 3]
    for rows in by_sequences.values():
        assert [row["what"] for row in rows] == [*(op.name for op in OPS), REST]
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert all(row["milliseconds"] >= 0 for row in rows)
        assert {row["what"] for row in rows if row["milliseconds"] > 0} >= {
            "linear",
            "attend",
            "write_kv",
            "rope",
            REST,
        }


def test_the_engine_is_as_before(tiny: Path) -> None:
    driver, other = Driver(tiny), Driver(tiny)
    measure(driver.engine, "paged", 2, 10)
    assert not driver.core.busy
    assert driver.engine.core.arena.in_use == 0 or driver.core.caches["paged"].usage().evictable_blocks > 0
    heard, expected = (each.submit("it", random_prompt(30), 6) for each in (driver, other))
    driver.run()
    other.run()
    assert heard.tokens == expected.tokens


def test_what_another_operation_calls_is_counted_once(tiny: Path) -> None:
    """The reference's attend gathers; a sum larger than the whole would show."""
    driver = Driver(tiny, kernels="reference")
    shares = {share.what: share.share for share in measure(driver.engine, "paged", 1, 50)}
    assert shares["attend"] > 0 == shares["gather"]
    assert 0 < shares[REST] < 1


def test_an_operation_that_raises_is_timed_as_well(tiny: Path) -> None:
    ops = Driver(tiny).engine.kernels.ops
    with Stopwatch(ops) as watch, pytest.raises(AttributeError):
        ops.linear(None, None)  # type: ignore[arg-type]
    assert watch.seconds["linear"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kv-cache", "none"], "--kv-cache: there are paged, contiguous, sliding_window"),
        (["--context", "0"], "--context: from 1 to"),
        (["--sequences", "0"], "--sequences: from 1 on"),
        (["--context", "9000"], "--context: from 1 to"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_step.main(arguments)
    assert told in capsys.readouterr().err
