"""The self-check: compares every operation of a backend with the reference, on small inputs, before serving starts.

An operation that fails is replaced by the reference's, so a wrong kernel makes the server slower, but not wrong.
kernels/backends.py calls this and logs the results.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels.composite import CompositeOps
from kernels.ops import OP_NAMES, SINGLE_OPS, Attention, DecoderLayers, Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.layer_ops import FORWARD_LAYERS
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import OpInfo


class Verdict(NamedTuple):
    """The result of checking one operation."""

    op: str  # its full name
    error: float  # largest difference from the reference, relative to its largest number; 0 without a result
    fault: str | None  # what is wrong, in words; None if nothing is


def check_ops(ops: Ops, dtype: torch.dtype, device: torch.device, names: Collection[str] = OP_NAMES) -> list[Verdict]:
    """Check the operations of a backend that have these names; return a verdict for each of their rows in OPS."""
    reference = ReferenceOps()
    verdicts: list[Verdict] = []
    for op in OPS:  # forward_layers comes last, and is checked with the failed operations replaced
        if op.name not in names:
            continue
        verdicts.append(
            _check_op(op, replace_faulty(ops, verdicts) if op is FORWARD_LAYERS else ops, reference, dtype, device)
        )
    return verdicts


def replace_faulty(ops: Ops, verdicts: list[Verdict]) -> Ops:
    """Return the operations of a backend; those with a fault are replaced by the reference's."""
    broken = {verdict.op.partition(".")[0] for verdict in verdicts if verdict.fault is not None}
    return cast("Ops", _MixedOps(ops, ReferenceOps(), broken)) if broken else ops


class _MixedOps:
    """Implements `Ops` by a backend, except for its broken operations, which the reference computes."""

    batch_invariant_head_dim = 0  # as the reference's

    def __init__(self, ops: Ops, reference: Ops, broken: set[str]) -> None:
        self.prepare = ops.prepare
        self.check_slots = ops.check_slots
        self.commit = ops.commit
        self.pack = (reference if "linear" in broken else ops).pack
        self.pack_layers = reference.pack_layers
        for name in SINGLE_OPS:
            setattr(self, name, getattr(reference if name in broken else ops, name))

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        return CompositeOps.forward_layers(cast("Ops", self), layers, x, attention)  # calls the operations above


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
    except Exception as exception:  # a backend may raise anything
        return Verdict(op.full_name, 0.0, f"{type(exception).__name__}: {exception}")
    return Verdict(op.full_name, worst, None)


def compute_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest number of `theirs`; shapes and dtypes must be equal."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), "another shape or dtype than the reference's"
    ours, theirs = ours.cpu().double(), theirs.cpu().double()  # some devices do not have float64
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
