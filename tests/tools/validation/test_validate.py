"""kvmux computes what llama.cpp computes, as `make validate` compares them; and the command and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from cache_strategies.registry import list_kinds
from tests.real.model_files import find_model
from tools.bench.report import replace_section
from tools.real_models import REAL_MODELS
from tools.validation import __main__ as command
from tools.validation.files import FLOAT32, FileValidation, ValidationOptions
from tools.validation.kvmux import make_config
from tools.validation.predictions import Agreement, GreedyAgreement
from tools.validation.report import BOUNDS, ValidatedFile, ValidatedRow, ValidationReport, as_json, as_text
from tools.validation.subjects import Sizes, make_subject

ROOT = Path(__file__).parents[3]
SMALL = Sizes(window=96, num_windows=2, predicted=16, texts=4, max_tokens=12)  # `streaming` needs 84 tokens


@pytest.mark.apart
def test_kvmux_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    strategies = ["paged", "contiguous", "sliding_window_quarter", "paged_int8"]
    said: list[str] = []
    subject = make_subject("tiny", tmp_path, SMALL)
    checked = FileValidation(subject, ValidationOptions(1, ["float32"], strategies), said.append).run()
    assert not checked.failures
    base, as_stored, rounded, *rows = checked.rows
    assert base.agreement.max_difference == 0
    assert as_stored.agreement.mean_difference > 1e-5, "llama.cpp rounds activations"
    assert rounded.agreement.mean_difference > 1e-5, "llama.cpp rounds keys and values"
    assert {row.strategy for row in rows} == set(strategies)
    for row in rows:
        assert row.agreement.positions == SMALL.num_windows * SMALL.predicted
        assert row.exact == (row.strategy in ("paged", "contiguous"))
        assert row.exact or row.agreement.mean_difference > 1e-5, "a strategy that drops or rounds"
    assert any("kvmux, float32, paged" in each for each in said), "progress is shown"


@pytest.mark.apart
@pytest.mark.parametrize("name", ["tiny-q8_0", "smollm2"])
def test_quantized_files_are_read_as_llama_cpp_reads_them(name: str, tmp_path: Path) -> None:
    if name in REAL_MODELS:
        find_model(name)
    subject = make_subject(name, tmp_path, SMALL)
    options = ValidationOptions(1, ["float32"], ["paged"], [FLOAT32])
    checked = FileValidation(subject, options, print).run()
    assert not checked.failures
    assert [row.program for row in checked.rows] == ["llama.cpp", "kvmux"]


def test_the_settings_have_every_kind() -> None:
    text = make_config(512)
    kinds = {line.partition(" = ")[2].strip('"') for line in text.splitlines() if line.startswith('"kind"')}
    assert kinds >= set(list_kinds())
    assert '"window" = 128' in text


# -------------------------------------------------------------------- the report
def make_row(
    strategy: str,
    *,
    ratio: float = 1.0,
    mean: float = 0.0,
    margins: list[float] | None = None,
    dtype: str = "float32",
    exact: bool = True,
) -> ValidatedRow:
    margins = margins or []
    greedy = GreedyAgreement(2, 2 - len(margins), 100, 90, margins)
    return ValidatedRow("kvmux", dtype, strategy, exact, Agreement(10, 5 * ratio, ratio, mean, 0.2, 0.9), greedy)


def make_file(*rows: ValidatedRow, differing: list[str] | None = None) -> ValidatedFile:
    first = ValidatedRow("llama.cpp", "float32", "-", False, Agreement(10, 5, 1, 0, 0, 1), make_row("-").greedy)
    return ValidatedFile("tiny", "tiny.gguf", 2, 50, 20, differing or [], [first, *rows])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_an_exact_strategy_has_bounds(dtype: str) -> None:
    bounds = BOUNDS[dtype]
    within = make_row("paged", mean=bounds.mean_difference, margins=[0.9 * bounds.near_tie], dtype=dtype)
    assert not make_file(within).failures
    assert not make_file(make_row("w", ratio=1.5, mean=1.0, margins=[2.0, 3.0], dtype=dtype, exact=False)).failures
    drop, mean = 1.1 * bounds.perplexity, 1.1 * bounds.mean_difference
    outside = {
        f"perplexity {-drop:+.2%}": make_row("paged", ratio=1 - drop, dtype=dtype),
        "perplexity +nan%": make_row("paged", ratio=float("nan"), dtype=dtype),
        f"log-probabilities differ by {mean:.4f} nats on average": make_row("paged", mean=mean, dtype=dtype),
        "log-probabilities differ by nan nats on average": make_row("paged", mean=float("nan"), dtype=dtype),
        "1 of 2 greedy texts differ clearly": make_row("paged", margins=[0.0, bounds.near_tie], dtype=dtype),
    }
    for said, row in outside.items():
        assert make_file(row).failures == [f"tiny: kvmux, {dtype}, paged: {said}"]


def test_tokenizers_have_to_agree() -> None:
    assert make_file(differing=["1 2  3"]).failures == ["tiny: the tokens of '1 2  3' differ"]


def test_the_report_has_a_row_for_each_strategy() -> None:
    row = make_row("paged", ratio=2.0, mean=0.01, margins=[1.0])
    report = ValidationReport(datetime(2026, 1, 2).astimezone(), "1", "llama.cpp 2", [make_file(row)], ["gemma3"])
    text = as_text(report)
    assert "| llama.cpp | float32 | - | 5.0000 | +0.000% | 0.0000, 0.0000 | 100.00% | 2 of 2 | 90.0% | 0 |" in text
    assert "| kvmux | float32 | `paged` | 10.0000 | +100.000% | 0.0100, 0.2000 | 90.00% | 1 of 2 | 90.0% | 1 |" in text
    assert "- not as expected: tiny: kvmux, float32, paged: perplexity +100.00%" in text
    assert "- gemma3 was left out: `make models MODELS=gemma3` fetches it" in text
    told = json.loads(json.dumps(as_json(report)))
    assert told["files"][0]["rows"][1]["agreement"]["perplexity_ratio"] == 2.0
    assert len(told["not_as_expected"]) == 3


# -------------------------------------------------------------------- the command
def test_the_command_writes_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / command.DOCUMENT
    document.write_text(f"<!-- printed by {command.MARK} -->\n<!-- end of {command.MARK} -->")
    report = ValidationReport(datetime(2026, 1, 2).astimezone(), "1", "llama.cpp 2", [make_file(make_row("paged"))])
    assert command.publish(report, tmp_path, tmp_path / "it.json") == 0
    assert capsys.readouterr().out.strip() in document.read_text()
    assert json.loads((tmp_path / "it.json").read_text())["kvmux_version"] == "1"
    failed = replace(report, files=[make_file(make_row("paged", ratio=2.0))])
    assert command.publish(failed, None, None) == command.FAILED
    assert command.publish(replace(report, failed=["smollm2 was not computed"]), None, None) == command.FAILED
    assert "- not as expected: smollm2 was not computed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--threads", "0"], ["--only", "nothing"], ["--docs", ".", "--only", "tiny"], ["--strategies", "pagd"]],
)
def test_wrong_arguments_are_reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "make validate: error" in capsys.readouterr().err


def test_the_committed_document_has_a_place_for_the_tables() -> None:
    document = (ROOT / "docs" / "laboratory" / command.DOCUMENT).read_text()
    assert "here they are" in replace_section(document, command.MARK, "here they are")
