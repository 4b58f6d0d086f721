"""Measures by `kvmux evaluate` how far each strategy is from exact caching."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.server_process import RunError, run_module


@dataclass(frozen=True)
class StrategyFidelity:
    """The fidelity of one strategy to exact caching, on running text."""

    kl: float  # mean KL divergence from exact caching, nats per token
    same_top: float  # share of tokens with the same likeliest token
    perplexity: float | None


def evaluate(flags: Sequence[str], length: int) -> dict[str, Any]:
    """Return the JSON report of `kvmux evaluate` on texts of this length; a failed evaluation has its "error" instead.

    Tokens are computed one by one, as strategies like `quest` lose something for generated tokens only.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        size = ("--length", str(length), "--row-tokens", "1", "--records", "1")  # records are not looked at
        try:
            run_module("server", "evaluate", *flags, *size, "--json", str(file))
            report: dict[str, Any] = json.loads(file.read_text())
        except RunError as error:
            return {"error": str(error).strip().splitlines()[-1]}
    return report


def read_fidelity(reports: Mapping[str, Any] | None, length: int) -> dict[str, StrategyFidelity]:
    """Return the fidelity of each strategy at a prompt length, by name; empty if its evaluation failed."""
    report = (reports or {}).get(str(length), {})
    return {
        each["name"]: StrategyFidelity(
            each["text"]["kl_nats"], each["text"]["top1_agreement"], each["text"]["perplexity"]
        )
        for each in report.get("strategies", ())
    }
