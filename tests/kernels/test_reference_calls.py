"""Counts the torch calls of the reference's attention in a step, which docs/guide/techniques.md states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.reference.attention import TILE
from kernels.reference.backend import ReferenceOps
from tools.bench import kernel_inputs

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "techniques.md"
VIEWS = ("view", "_unsafe_view", "select", "slice", "transpose", "unsqueeze", "expand", "detach", "alias")


class Calls(TorchDispatchMode):
    """Counts calls of torch that compute or move something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(count for name, count in self.count.items() if name not in VIEWS)


def calls(dtype: torch.dtype, context: int) -> int:
    """Return the calls of attention in one layer, after the indices of the step were made."""
    sequences = kernel_inputs.Sequences(dtype, context)
    at, layer = next(sequences.iter_slots())
    q = torch.zeros(1, kernel_inputs.HEADS, kernel_inputs.HEAD_DIM, dtype=torch.bfloat16)
    ops, out = ReferenceOps(), torch.empty_like(q)
    ops.attend(out, q, sequences.store, layer, at, kernel_inputs.LAYERS[layer])
    with Calls() as counted:
        ops.attend(out, q, sequences.store, layer, at, kernel_inputs.LAYERS[layer])
    return counted.total


@pytest.fixture
def documented() -> Callable[[str], int]:
    text = " ".join(PAGE.read_text().split())
    found = re.search(r"In bfloat16 it is (\d+) calls of torch a tile, in float32 (\d+), in int8 (\d+) ", text)
    assert found
    return dict(zip(("bfloat16", "float32", "int8"), map(int, found.groups()), strict=True)).__getitem__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_calls_a_tile_are_those_of_the_document(
    monkeypatch: pytest.MonkeyPatch, documented: Callable[[str], int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(kernel_inputs, "GIBIBYTE", 1 << 20)  # one sequence is enough
    tiles = 8
    more = calls(dtype, 2 * tiles * TILE) - calls(dtype, tiles * TILE)
    assert more == tiles * documented(str(dtype).removeprefix("torch."))
