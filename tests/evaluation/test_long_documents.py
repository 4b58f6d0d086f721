"""`kvmux evaluate` on documents that are longer than the model's context, which only unbounded strategies can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.cli.main import main

NARROW, WIDE = "streaming:window=40,every=20", "streaming:window=300,every=60"
SMALL = ("--texts", "1", "--records", "1", "--threads", "1", "--dtype", "float32")


def evaluate(file: Path, *flags: str) -> dict[str, Any]:
    """Run an evaluation; return its JSON."""
    assert main(["evaluate", *flags, "--json", str(file)]) == 0
    return dict(json.loads(file.read_text()))


def test_strategies_are_compared_with_the_first_one(model_directory: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model_directory), *SMALL, "--strategy", WIDE, "--strategy", NARROW)
    report = evaluate(tmp_path / "report.json", *flags, "--length", "1300")
    assert (report["exact"], report["length"]) == (None, 1300)
    wide, narrow = report["strategies"]
    assert (wide["text"]["tokens"], narrow["text"]["tokens"]) == (1300, 1300)
    assert (wide["text"]["top1_agreement"], wide["text"]["kl_nats"]) == (1, 0)
    assert narrow["text"]["kl_nats"] > 0
    assert narrow["kv_bytes"] < wide["kv_bytes"]


def test_a_strategy_that_cannot_read_them_is_named(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", str(model_directory), *SMALL, "--strategy", WIDE, "--strategy", "paged", "--length", "1300")
    assert main(["evaluate", *flags]) == 2
    told = capsys.readouterr().err
    assert "--length: should be from 2 to 512 tokens, the context of the model; only strategies with" in told
    assert told.strip().endswith("there is paged")


@pytest.mark.parametrize("length", [1024, 3 * 2048])
def test_stories_stay_as_predictable_as_within_the_context(length: int, tmp_path: Path) -> None:
    """The embedded model has learned positions up to 2,048; its perplexity of whole stories is 1.53."""
    report = evaluate(
        tmp_path / "report.json", *SMALL, "--strategy", "streaming:window=512,every=128", "--length", str(length)
    )
    (found,) = (each for each in report["strategies"] if each["kind"] == "streaming")
    print(length, found["text"])
    assert found["text"]["perplexity"] < 1.62
