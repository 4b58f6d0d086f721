"""How far each strategy is from exact caching at a prompt length, by `kvmux evaluate`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.profiling.running import RunError, run_module


@dataclass(frozen=True)
class StrategyFidelity:
    """The fidelity of one strategy to exact caching, on running text."""

    exact: bool  # whether it promises to drop and round nothing
    kl: float  # mean KL divergence from exact caching, nats per token
    same_top: float  # share of tokens with the same likeliest token
    perplexity: float | None


def evaluate(flags: Sequence[str], lengths: Sequence[int], show_status: Callable[[str], None]) -> dict[str, Any]:
    """Return the JSON report of `kvmux evaluate` by length, as text; a failed evaluation has its "error" instead."""
    found: dict[str, Any] = {}
    for length in lengths:
        show_status(f"fidelity at {length:,} tokens")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            try:
                run_module("server", "evaluate", *flags, "--length", str(length), "--json", str(file))
                found[str(length)] = json.loads(file.read_text())
            except RunError as error:
                found[str(length)] = {"error": str(error).strip().splitlines()[-1]}
    return found


def read_fidelity(reports: Mapping[str, Any] | None, length: int) -> dict[str, StrategyFidelity]:
    """Return the fidelity of each strategy at a length, by name; empty if its evaluation failed."""
    report = (reports or {}).get(str(length), {})
    return {
        each["name"]: StrategyFidelity(
            each["exact"], each["text"]["kl_nats"], each["text"]["top1_agreement"], each["text"]["perplexity"]
        )
        for each in report.get("strategies", ())
    }
