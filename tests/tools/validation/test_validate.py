"""kvmux computes what llama.cpp computes, as `make validate` compares them; and what is out of bounds is named."""

from __future__ import annotations

import tomllib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cache_strategies.registry import list_kinds
from tests.real.model_files import find_model
from tools.bench import __main__ as command
from tools.bench.report import replace_section
from tools.bench.runner import Effort, Reading, Sample, run_cases
from tools.real_models import REAL_MODELS
from tools.validation import cases
from tools.validation.cases import BOUNDS, GROUP, make_case
from tools.validation.kvmux import make_config
from tools.validation.predictions import GreedyText, Predictions, Results, compare
from tools.validation.subjects import Sizes

ROOT = Path(__file__).parents[3]
SMALL = Sizes(window=96, num_windows=2, predicted=16, texts=4, max_tokens=12)  # `streaming` needs 84 tokens
MEAN, PERPLEXITY = "log-probability, mean difference", "differs from llama.cpp's by"


def validate(name: str, strategies: Sequence[str]) -> dict[tuple[str, str], Reading]:
    """Return what is measured of a model in float32, by variant and row; all of it is as expected."""
    options = Namespace(threads=1, dtypes=["float32"], strategies=strategies)
    found = {}
    for each in run_cases([make_case(name, options, SMALL)], Effort(1), print):
        assert isinstance(each, Sample), each
        row, value = each.reading.row, each.reading.value
        assert value is not None
        assert row.meets_goal(value) is not False, each
        found[each.variant, row.what] = each.reading
    return found


@pytest.mark.apart
def test_kvmux_computes_what_llama_cpp_computes() -> None:
    strategies = ["paged", "contiguous", "sliding_window_quarter", "paged_int8"]
    found = validate("tiny", strategies)
    means = {variant: reading for (variant, what), reading in found.items() if what == MEAN}
    assert means["llama.cpp, float32"].value == 0
    assert (means["llama.cpp, as stored"].value or 0) > 1e-5, "llama.cpp rounds activations"
    assert (means["llama.cpp, float32, cache q8_0"].value or 0) > 1e-5, "llama.cpp rounds keys and values"
    for strategy in strategies:
        mean = means[f"kvmux, float32, {strategy}"]
        assert (mean.row.goal is not None) == (strategy in ("paged", "contiguous"))
        assert mean.row.goal is not None or (mean.value or 0) > 1e-5, "a strategy that drops or rounds"
    tokens = found["kvmux, float32, tokens of texts", "texts with the same tokens"]
    assert tokens.value == tokens.row.goal


@pytest.mark.apart
@pytest.mark.parametrize("name", ["tiny-q8_0", "smollm2"])
def test_quantized_files_are_read_as_llama_cpp_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in REAL_MODELS:
        find_model(name)
    monkeypatch.setattr(cases, "LLAMA_CPP_ROWS", {cases.FLOAT32: "f32"})
    assert ("kvmux, float32, paged", MEAN) in validate(name, ["paged"])


def test_the_settings_have_every_kind() -> None:
    strategies = tomllib.loads(make_config(512))["strategies"].values()
    assert {each["kind"] for each in strategies} >= set(list_kinds())
    assert 128 in [each.get("window") for each in strategies]


# -------------------------------------------------------------------- bounds
def make_results(shift: float = 0.0, margin: float | None = None) -> Results:
    """Return log-probabilities off by `shift`, and a greedy text that parts where the margin is `margin`."""
    predictions = Predictions(np.array([-1.0 + shift, -2.0 + shift]), [frozenset({1}), frozenset({2})])
    text = GreedyText([1, 2], [5.0, 5.0]) if margin is None else GreedyText([1, 9], [5.0, margin])
    return Results(predictions, [text])


def find_missed(own: Results, dtype: str, *, exact: bool = True) -> set[str]:
    base = make_results(margin=None)._replace(greedy=[GreedyText([1, 2], [5.0, 0.0])])
    readings = [each for each in compare(own, base, BOUNDS[dtype], exact=exact) if each.value is not None]
    return {each.row.what for each in readings if each.row.meets_goal(each.value or 0.0) is False}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_an_exact_strategy_has_bounds(dtype: str) -> None:
    bounds = BOUNDS[dtype]
    within = min(bounds.mean_difference, bounds.perplexity)
    assert find_missed(make_results(0.9 * within, 0.9 * bounds.near_tie), dtype) == set()
    assert find_missed(make_results(1.0, 2.0), dtype, exact=False) == set()
    assert find_missed(make_results(1.2 * max(bounds.mean_difference, bounds.perplexity)), dtype) == {MEAN, PERPLEXITY}
    assert find_missed(make_results(float("nan")), dtype) == {MEAN, PERPLEXITY}
    assert find_missed(make_results(0.0, bounds.near_tie), dtype) == {"clear differences"}


# -------------------------------------------------------------------- the command
@pytest.mark.parametrize("arguments", ["--only nothing", "--docs . --only tiny", "--strategies pagd"])
def test_wrong_arguments_are_reported(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["validation", *arguments.split()])
    assert "make validate: error" in capsys.readouterr().err


def test_the_committed_document_has_a_place_for_the_tables() -> None:
    document = (ROOT / "docs" / "laboratory" / str(GROUP.document)).read_text()
    assert "here they are" in replace_section(document, GROUP.command, "here they are")
