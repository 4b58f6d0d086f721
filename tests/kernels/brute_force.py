"""Which keys a query sees by the definitions of the built-in strategies, and of a test's cases of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.selfcheck.attention_case import AttentionCase
from plugin_kit.driver.reference import Keeps, keep_all

KEEPS: Mapping[str, Callable[[Any], Keeps]] = {  # built-in kinds, by their options; the model's own window comes on top
    "contiguous": lambda options: keep_all,
    "mirrored": lambda options: keep_all,
    "paged": lambda options: keep_all,
    "residual": lambda options: keep_all,
    "sliding_window": lambda options: lambda i, j: (j < options.sinks) | (i - j < options.window),
}


def visible_in_case(case: AttentionCase, row: int, head: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return (which of a row's keys a head keeps [S], the mask [n, S] of those that each of its n queries sees)."""
    which, positions = case.list_kept(row, head)
    n = case.rows[row].tokens
    query, key = torch.arange(len(which) - n, len(which))[:, None], torch.arange(len(which))
    mask = key <= query
    if window is not None:
        mask &= (query - key < window) | (key < case.layout.sinks)
    if case.spec.window is not None:
        mask &= positions[-n:, None] - positions < case.spec.window
    return which, mask
