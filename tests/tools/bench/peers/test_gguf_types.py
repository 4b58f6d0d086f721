"""The table of types says what each loses, but for the type whose steps the weights were rounded to already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.bench.peers.gguf_types import TypeReport, as_text

MIB = 1 << 20


def test_a_row_has_size_bits_speed_memory_and_loss() -> None:
    losses = np.array([0.2, 0.0, 0.1, 0.1])
    reports = [
        TypeReport("Q8_0", 17_000_000, 16_000_000, 300 * MIB, losses, [10.0, 30.0, 12.0]),
        TypeReport("Q4_K_M", 9_000_000, 16_000_000, 200 * MIB, losses * 0, [20.0, 25.0, 24.0]),
    ]
    lines = as_text(Path("a.gguf"), reports, "Q4_K_M").splitlines()
    assert lines[-2:] == [
        "| Q8_0 | 17 | 8.5 | 12.0 | 300 | +10.5% ± 3.5% |",
        "| Q4_K_M | 9 | 4.5 | 24.0 | 200 | (the file's own) |",
    ]
    assert "over 4 tokens" in lines[0]


def test_perplexity_changes_by_the_mean_loss() -> None:
    change, error = TypeReport("Q2_K", 1, 1, 0, np.full(100, np.log(1.5))).perplexity
    assert (change, error) == pytest.approx((0.5, 0.0))
