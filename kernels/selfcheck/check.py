"""The self-check: every operation of a backend against the reference, on small inputs, before anything is served.

An operation that fails is replaced by the reference's, so that a wrong kernel costs speed and not answers. Which
backend is checked, and who is told, is load.py's business.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels import composite
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from kernels.selfcheck.op_info import LAYERS, OPS, Op


class Verdict(NamedTuple):
    """What came of checking one operation."""

    op: str
    error: float  # the largest, as a share of the largest number; 0 if it could not be compared
    fault: str | None  # None: it is as it should be


def checked(ops: Ops, dtype: torch.dtype, device: torch.device) -> list[Verdict]:
    """A verdict for each operation."""
    reference = ReferenceOps()
    verdicts: list[Verdict] = []
    for op in OPS:  # that which is made of others comes last, and is not blamed for those
        verdicts.append(_check(op, mended(ops, verdicts) if op.name == LAYERS else ops, reference, dtype, device))
    return verdicts


def mended(ops: Ops, verdicts: list[Verdict]) -> Ops:
    """The same operations, those with a fault from the reference."""
    broken = {verdict.op for verdict in verdicts if verdict.fault is not None}
    return cast("Ops", _Mended(ops, ReferenceOps(), broken)) if broken else ops


class _Mended:
    def __init__(self, ops: Ops, reference: Ops, broken: set[str]) -> None:
        self.prepare = ops.prepare
        self.packed = (reference if broken & {"linear", "quantized_linear"} else ops).packed
        for op in OPS:
            setattr(self, op.name, getattr(reference if op.name in broken else ops, op.name))
        self.stacked = reference.stacked
        self.run_layers = partial(composite.run_layers, cast("Ops", self))  # of what stands here


def _check(op: Op, ops: Ops, reference: Ops, dtype: torch.dtype, device: torch.device) -> Verdict:
    worst = 0.0
    try:
        for (what, ours), (_, theirs) in zip(
            op.tried(ops, dtype, device), op.tried(reference, dtype, device), strict=True
        ):
            off = error_of(ours, theirs)
            if not off <= op.tolerance[dtype]:  # NaN, too
                return Verdict(op.name, off, f"{what}: off by {off:.1e} of the largest number")
            worst = max(worst, off)
    except Exception as error:  # whatever a backend may raise
        return Verdict(op.name, 0.0, f"{type(error).__name__}: {error}")
    return Verdict(op.name, worst, None)


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """The largest, as a share of the largest number. Both have one shape and dtype."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), "another shape or dtype than the reference's"
    ours, theirs = ours.cpu().double(), theirs.cpu().double()  # there are devices without float64
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
