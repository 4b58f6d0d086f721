"""Groups of cases that have no test of their own run in their smallest form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from tools.bench.__main__ import main
from tools.bench.checkouts import THIS_CHECKOUT
from tools.peers.llama_cpp_divergence import compare


def measure(tmp_path: Path, group: str, *arguments: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the samples of a group by what was measured, and by variant."""
    file = tmp_path / "it.json"
    assert main([group, "--json", str(file), *arguments]) == 0
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for each in json.loads(file.read_text())["rows"]:
        found.setdefault(each["what"], {}).setdefault(each["variant"], []).append(each)
    return found


def test_strategies_decode_by_turns(tmp_path: Path) -> None:
    size = ["--model", "tiny", "--context", "100", "--turns", "2", "--steps", "40", "--kv-memory", "64MiB"]
    strategies = ["--strategy", "paged", "--strategy", "compressed:budget=48,every=32"]
    found = measure(tmp_path, "decoding", *size, *strategies, "--sequences", "1", "2")
    steps = found["a step"]
    assert [*steps] == ["paged", "compressed-budget48-every32"]
    assert all(len(each) == 4 and each[0]["value"] > 0 for each in steps.values()), "two turns of two cases"
    memory = found["KV memory of all sequences"]
    assert memory["paged"][0]["value"] > memory["compressed-budget48-every32"][0]["value"]


def test_scorers_lose_something_and_exact_caching_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, "compression", "--scorer", "knorm", "--texts", "1", "--records", "1", "--turns", "1")
    divergence = {variant: each[0]["value"] for variant, each in found["KL of records"].items()}
    assert divergence["100.0%, exact"] == 0
    assert 0 < divergence["50.0%, knorm"] < divergence["12.5%, knorm"]
    assert found["recall, question seen"].keys() == divergence.keys()


def test_grammars_are_followed_and_batches_have_some(tmp_path: Path) -> None:
    found = measure(tmp_path, "grammars", "--model", "tiny", "--streams", "2", "--steps", "4", "--turns", "1")
    assert found["work for a token, mean"]["people"][0]["value"] > 0
    assert [*found["a step"]] == ["0 constrained", "1 constrained", "2 constrained"]


def test_fewer_bits_of_keys_and_values_cost_more(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a server that kept what it had read in few bits. " * 20)
    size = ["--text", str(text), "--lengths", "150", "--last", "50", "--threads", "1"]
    found = measure(tmp_path, "kv_formats", "--model", "tiny", "--programs", "kvmux", "--kernels", "reference", *size)
    divergence = {variant: each[0]["value"] for variant, each in found["KL, mean"].items()}
    assert 0 < divergence["kvmux, int8"] < divergence["kvmux, int8, int4"] < divergence["kvmux, int4"]


def test_llama_cpps_divergence_is_that_of_torch() -> None:
    base, logits = torch.randn(2, 9, 40, dtype=torch.float32).unbind()
    found = compare(base.numpy(), logits.numpy())
    expected = kl_div(logits.log_softmax(-1), base.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert found["kl_nats"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert found["kl_median"] == pytest.approx(expected.median().item(), rel=1e-5)
    assert found["top1_agreement"] == pytest.approx((base.argmax(-1) == logits.argmax(-1)).float().mean().item())


@pytest.mark.apart
def test_checkouts_are_compared_by_turns(tmp_path: Path) -> None:
    base = ["--base", str(THIS_CHECKOUT), "--turns", "1", "--only", "tokenize", "CPU"]
    found = measure(tmp_path, "checkouts", *base, "--", "--kv-memory", "64MiB", "--threads", "1")
    assert {what: [*variants] for what, variants in found.items()} == {
        "tokenize": ["now", "before"],
        "CPU time of a token": ["now", "before"],
    }
