"""Measures by `kvmux evaluate` how far each strategy is from exact caching."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.server_process import run_module


class StrategyFidelity(NamedTuple):
    """The fidelity of one strategy to exact caching, on running text."""

    kl: float  # mean KL divergence from exact caching, nats per token
    same_top: float  # share of tokens with the same likeliest token
    perplexity: float | None


def evaluate(flags: Sequence[str], length: int) -> dict[str, StrategyFidelity]:
    """Return the fidelity of each strategy on texts of this length, by name. Raises RunError.

    Tokens are computed one by one, as strategies like `quest` lose something for generated tokens only.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        size = ("--length", str(length), "--row-tokens", "1", "--records", "0")
        run_module("server", "evaluate", *flags, *size, "--json", str(file))
        strategies = json.loads(file.read_text())["strategies"]
    texts = {each["name"]: each["text"] for each in strategies}
    return {
        name: StrategyFidelity(each["kl_nats"], each["top1_agreement"], each["perplexity"])
        for name, each in texts.items()
    }
