"""Checks the figures of docs/laboratory/embedded_model.md against their files, and measures a sample of them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.cli.main import main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "laboratory" / "data"
FULL = json.loads((DATA / "model.json").read_text())
SAMPLE = json.loads((DATA / "model_sample.json").read_text())
RECALL_AIM, CHANCE = 0.95, 0.1
# The command of docs/laboratory/embedded_model.md with fewer documents: the first of the same ones.
ARGUMENTS = "--strategy contiguous --strategy sliding_window:window=64,sinks=0 --texts 1 --records 4"


def _by_name(report: dict[str, Any]) -> dict[str, Any]:
    return {strategy["name"]: strategy for strategy in report["strategies"]}


def _answers(strategy: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of right answers and of all answers, at all distances together."""
    spans = strategy["records"]["recall"]
    return sum(span["right"] for span in spans), sum(span["asked"] for span in spans)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("sample") / "report.json"
    assert main(["evaluate", *ARGUMENTS.split(), "--dtype", "float32", "--threads", "1", "--json", str(file)]) == 0
    return _by_name(json.loads(file.read_text()))


@pytest.mark.parametrize("name", _by_name(SAMPLE))
def test_a_sample_comes_out_as_it_was_committed(sample: dict[str, Any], name: str) -> None:
    for part in ("text", "records"):
        found, committed = sample[name][part], _by_name(SAMPLE)[name][part]
        assert found["tokens"] == committed["tokens"]
        assert found["perplexity"] == pytest.approx(committed["perplexity"], rel=1e-3)
        assert found["top1_agreement"] == pytest.approx(committed["top1_agreement"], abs=2e-3)
        assert found["kl_nats"] == pytest.approx(committed["kl_nats"], rel=0.01, abs=1e-6)
    for found, committed in zip(
        sample[name]["records"]["recall"], _by_name(SAMPLE)[name]["records"]["recall"], strict=True
    ):
        assert found["asked"] == committed["asked"]
        assert abs(found["right"] - committed["right"]) <= 1  # two tokens may be all but equally likely


def test_the_sample_is_like_the_whole() -> None:
    for name, sampled in _by_name(SAMPLE).items():
        whole = _by_name(FULL)[name]
        assert sampled["text"]["perplexity"] == pytest.approx(whole["text"]["perplexity"], rel=0.1)
        right, asked = (sum(span[key] for span in sampled["records"]["recall"]) for key in ("right", "asked"))
        share = sum(s["right"] for s in whole["records"]["recall"]) / sum(
            s["asked"] for s in whole["records"]["recall"]
        )
        assert abs(right - share * asked) <= 4 * (share * (1 - share) * asked) ** 0.5 + 1


def test_exact_caching_remembers_and_a_narrow_window_does_not() -> None:
    exact = _by_name(FULL)["contiguous"]["records"]["recall"]
    narrow = _by_name(FULL)["sliding_window-window64-sinks0"]["records"]["recall"]
    for span, forgotten in zip(exact, narrow, strict=True):
        assert span["asked"] >= 100
        assert span["right"] / span["asked"] >= RECALL_AIM
        if span["from"] > 128:
            assert forgotten["right"] / forgotten["asked"] <= CHANCE


def test_the_table_of_the_documentation_shows_these_figures() -> None:
    lines = (ROOT / "docs" / "laboratory" / "embedded_model.md").read_text().splitlines()
    for name, strategy in _by_name(FULL).items():
        row = next(line for line in lines if line.startswith(f"| {name} "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == f"{strategy['text']['perplexity']:.3f}"
        recall = [f"{s['right'] / s['asked']:.0%}" for s in strategy["records"]["recall"]]
        assert cells[-len(recall) :] == recall
