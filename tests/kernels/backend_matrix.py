"""The parameters of the kernel tests: backends, memory layouts, kinds of layers, rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from kernels.backends import REFERENCE, list_backends
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import CaseRow, Layout
from kernels.types import LayerSpec

# By name: the reference, and every backend that computes in the memory of this machine's CPU.
BACKENDS: Mapping[str, Callable[[], Ops]] = {
    REFERENCE: ReferenceOps,
    **{
        backend.name: backend.load
        for backend in list_backends()
        if backend.missing is None and (backend.device.tensors.type == "cpu" or backend.device.is_emulated)
    },
}
FASTEST = next((name for name in BACKENDS if name != REFERENCE), REFERENCE)  # what an engine on this CPU uses
SLOW = {"metal-checked"}  # where every access of every thread is looked at
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BACKENDS]

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


LAYOUTS = (
    Layout(300),
    Layout(16),
    Layout(5),
    Layout(1),
    Layout(54, sinks=4, ring=50),
    Layout(16, sinks=3, ring=61),
    Layout(16, dropped=True),
    Layout(7, dropped=True, split_heads=True),
)

SPECS = {
    "one head": LayerSpec(1, 1, 16, 16, scale=0.25),
    "as many KV heads as query heads": LayerSpec(3, 3, 8, 8, scale=0.4),
    "groups of 4": LayerSpec(2, 8, 16, 16, scale=0.25),
    "groups of 7": LayerSpec(2, 14, 8, 8, scale=0.35),
    "values wider than keys": LayerSpec(2, 4, 8, 24, scale=0.35),
    "values narrower than keys": LayerSpec(2, 6, 24, 8, scale=0.2),
    "no scale": LayerSpec(1, 2, 4, 4),
    "softcap": LayerSpec(2, 4, 8, 8, scale=0.5, softcap=2.0),
    "the model's window": LayerSpec(2, 4, 8, 8, scale=0.35, window=17),
    "a window wider than a strategy's": LayerSpec(1, 2, 8, 8, scale=0.35, window=180),
    "a window of one": LayerSpec(1, 2, 8, 8, scale=0.35, window=1),
    "sink logits": LayerSpec(2, 6, 8, 8, scale=0.35, sink_logits=torch.tensor([-3.0, 0.0, 1.0, 2.5, -1.0, 4.0])),
    "all at once": LayerSpec(
        2, 6, 8, 12, window=40, scale=0.5, softcap=5.0, sink_logits=torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, 9.0])
    ),
}


ROWS = (
    CaseRow(0, 1),
    CaseRow(200, 1),
    CaseRow(-1, 1),
    CaseRow(127, 1),
    CaseRow(128, 1),
    CaseRow(0, 9),
    CaseRow(120, 11),
    CaseRow(175, 6),
    CaseRow(-1, 4),
)
