"""The self-check: every operation of a backend against the reference, on small inputs, before anything is served.

An operation that fails is replaced by the reference's, so that a wrong kernel costs speed and not answers. Which
backend is checked, and what is logged of it, is the business of kernels/backends.py.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.ops import Attention, DecoderLayers, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OP_NAMES, OPS
from kernels.selfcheck.op_info import OpInfo


class Verdict(NamedTuple):
    """What came of checking one operation."""

    op: str  # its full name
    error: float  # the largest, as a share of the largest number; 0 if it could not be compared
    fault: str | None  # None: it is as it should be


def check_ops(ops: Ops, dtype: torch.dtype, device: torch.device) -> list[Verdict]:
    """Check each operation, and return a verdict on it."""
    reference = ReferenceOps()
    verdicts: list[Verdict] = []
    for op in OPS:  # that which is made of others comes last, and is not blamed for those
        verdicts.append(
            _check_op(op, replace_faulty(ops, verdicts) if op is FORWARD_LAYERS else ops, reference, dtype, device)
        )
    return verdicts


def replace_faulty(ops: Ops, verdicts: list[Verdict]) -> Ops:
    """Return the same operations, those with a fault from the reference."""
    broken = {op.name for op, verdict in zip(OPS, verdicts, strict=False) if verdict.fault is not None}
    return cast("Ops", _PatchedOps(ops, ReferenceOps(), broken)) if broken else ops


class _PatchedOps:
    def __init__(self, ops: Ops, reference: Ops, broken: set[str]) -> None:
        self.prepare = ops.prepare
        self.pack = (reference if "linear" in broken else ops).pack
        self.pack_layers = reference.pack_layers
        for name in {*OP_NAMES} - {FORWARD_LAYERS.name}:
            setattr(self, name, getattr(reference if name in broken else ops, name))

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        return CompositeOps.forward_layers(cast("Ops", self), layers, x, attention)  # made of the operations above


def _check_op(op: OpInfo, ops: Ops, reference: Ops, dtype: torch.dtype, device: torch.device) -> Verdict:
    worst = 0.0
    try:
        for (what, ours), (_, theirs) in zip(
            op.samples(ops, dtype, device), op.samples(reference, dtype, device), strict=True
        ):
            error = compute_error(ours, theirs)
            if not error <= op.tolerance[dtype]:  # NaN, too
                return Verdict(op.full_name, error, f"{what}: off by {error:.1e} of the largest number")
            worst = max(worst, error)
    except Exception as exception:  # whatever a backend may raise
        return Verdict(op.full_name, 0.0, f"{type(exception).__name__}: {exception}")
    return Verdict(op.full_name, worst, None)


def compute_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a share of the largest number. Both have one shape and dtype."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), "another shape or dtype than the reference's"
    ours, theirs = ours.cpu().double(), theirs.cpu().double()  # there are devices without float64
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
