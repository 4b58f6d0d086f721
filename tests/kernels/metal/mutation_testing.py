"""Runs mutants: Metal kernels with one small fault each, and finds what catches them.

A mutant is caught by the emulator's checks, by its compiler, or by a result of a row of kernels/selfcheck/op_db.py that
differs from the reference. A few more samples are here, which are too long or too exact for the self-check. mutants.py
has the list of mutants.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.kv_formats import INT4, KVFormats
from kernels.metal.attention import SPLIT
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from kernels.selfcheck.attention_case import AttentionCase, CaseRow, Layout
from kernels.selfcheck.check import compute_error
from kernels.selfcheck.op_db import OPS
from kernels.selfcheck.op_info import Samples
from kernels.types import LayerSpec
from metal_emulator import KernelFault, compile_shader
from tests.kernels.metal.source_pattern import change_once

CPU = torch.device("cpu")


class Kind(StrEnum):
    DROPPED = "barrier dropped"
    MEMORY = "barrier of the wrong memory"
    BRANCH = "barrier in a branch"
    INDEX = "index swapped"
    BOUND = "bound off by one"
    WRITERS = "two writers"
    LOGIC = "step forgotten"


class Mutant(NamedTuple):
    """A change to the assembled source of a file of kernels."""

    kernel: str
    kind: Kind
    words: str
    within: str  # functions and structs
    change: str  # as source_pattern reads it
    dtype: torch.dtype = torch.float32  # in which it shows

    def applied(self, text: str) -> str:
        return change_once(text, self.within, self.change)


# Kernels, the file of each and the operations that launch it.
KERNELS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("norms", "rms_norm"),
    "add_rms_norm": ("norms", "add_rms_norm"),
    "rope": ("layers", "rope"),
    "silu_mul": ("layers", "silu_mul"),
    "repeat_kv_heads": ("layers", "repeat_kv_heads", "repeat_kv_heads_step"),
    "write_kv": ("store", "write_kv"),
    "gather": ("store", "gather"),
    "copy_blocks": ("store", "copy_blocks"),
    "copy_tokens": ("store", "copy_tokens"),
    "decode": ("decode", "attend"),
    "merge": ("decode", "attend"),
    "prefill": ("prefill", "attend"),
    "linear": ("linear", "linear"),
    "quantized_linear": ("quantized", "linear.quantized"),
    "dequantize_weight": ("quantized", "linear.quantized"),
    "block_linear": ("blocks", "linear.blocks"),
    "dequantize_blocks": ("blocks", "linear.blocks"),
}


# -------------------------------------------------------------------- samples beyond those of the table
def _equal(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the share of numbers with equal bits; 1 for float32, whose last bit depends on the order of a sum."""
    return torch.ones(()) if ours.dtype is torch.float32 else (ours == theirs).float().mean()


def _norm_bits(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """An extra rounding is below every tolerance, but changes the bits of many numbers."""
    x, weight = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0)).to(device)
    for what, each in (("as in Llama", weight[0].to(dtype)), ("as in Gemma", weight[0])):
        arguments = x.to(dtype), each, 1e-6
        yield f"equal bits, {what}", _equal(ops.rms_norm(*arguments), ReferenceOps().rms_norm(*arguments))


def _gate_bits(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    yield "equal bits", _equal(ops.silu_mul(x), ReferenceOps().silu_mul(x))


def _long_texts(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """Several splits, in which all simdgroups have keys; wide heads and groups."""
    rows = (
        CaseRow(2 * SPLIT + 88, 1),
        CaseRow(SPLIT - 1, 1),
        CaseRow(SPLIT, 1),
        CaseRow(SPLIT + 30, 9),
        CaseRow(0, 70),
    )
    for what, spec, layout in (
        ("in a ring", LayerSpec(2, 4, 16, 8, scale=0.25), Layout(32, sinks=4, ring=300)),
        ("a group of 20", LayerSpec(1, 20, 80, 80, scale=0.11), Layout(16)),
        ("wide heads", LayerSpec(1, 3, 256, 200, scale=0.06), Layout(700)),
    ):
        case = AttentionCase(ReferenceOps(), layout, spec, rows, dtype, device)
        case.write()
        for row, out in zip(rows, case.attend(ops, window=290 if layout.ring else None), strict=True):
            yield f"{what}, {row.tokens} after {row.past}", out


def _hard_to_round(ops: Ops, dtype: torch.dtype, device: torch.device) -> Samples:
    """Vectors in int4 of large numbers close to each other, with a short group, some not finite."""
    format, spec = INT4._replace(rotated=False), LayerSpec(1, 1, 72, 24)
    case = AttentionCase(ops, Layout(7), spec, [CaseRow(0, 6)], dtype, formats=KVFormats(format, format))
    for part in (case.k[0], case.v[0]):
        part.add_(100)
        part[1:3, 0, 5] = torch.tensor((torch.nan, torch.inf))
        part[3, 0, :2] = torch.tensor((3e38, -3e38))
    case.write()
    yield "hard to round", case.pages.memory.float()


FURTHER = {"rms_norm": _norm_bits, "silu_mul": _gate_bits, "attend": _long_texts, "write_kv": _hard_to_round}


# -------------------------------------------------------------------- running them
def caught(kernel: str, dtype: torch.dtype, change: Callable[[str], str]) -> str | None:
    """Return what detects the changed source of a file; None if nothing does."""

    def compile_changed(text: str) -> Any:
        changed = is_source_of(kernel, text)
        return compile_shader(change(text) if changed else text, checked=changed)

    try:
        return find_difference(MetalOps(Kernels(compile_changed)), kernel, dtype)
    except KernelFault as fault:
        return f"checker: {_fault(str(fault))}"
    except SyntaxError as error:
        return f"compiler: {error}"


def is_source_of(kernel: str, text: str) -> bool:
    """Return whether a kernel is in this source."""
    return f'#line 1 "{KERNELS[kernel][0]}.metal"' in text


def find_difference(ops: Ops, kernel: str, dtype: torch.dtype, device: torch.device = CPU) -> str | None:
    """Return the first result of the operations that launch a kernel which differs from the reference."""
    _, *names = KERNELS[kernel]
    return next(filter(None, (_astray(ops, name, dtype, device) for name in names)), None)


def _astray(ops: Ops, name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the first result of an operation that differs from the reference."""
    op = next(op for op in OPS if op.full_name == name)
    for tried in filter(None, (op.samples, FURTHER.get(name))):
        for (what, ours), (_, theirs) in zip(
            tried(ops, dtype, device), tried(ReferenceOps(), dtype, device), strict=True
        ):
            error = compute_error(ours, theirs)
            if not error <= op.tolerance[dtype]:
                return f"off by {error:.0e}: {what}" if isfinite(error) else f"NaN: {what}"
    return None


def _fault(message: str) -> str:
    """Return a fault in a few words: `data race on 'sums'`."""
    kind = re.search(r": (data race|[a-z ]+)", message)
    assert kind, message
    name = re.search(r"'(\w+)'", message)
    return f"{kind[1]} on '{name[1]}'" if name else kind[1]


def try_mutant(mutant: Mutant) -> str | None:
    """Return what catches a mutant."""
    return caught(mutant.kernel, mutant.dtype, mutant.applied)


def workers() -> ProcessPoolExecutor:
    """Yield a pool with one process per core, in which uninitialised memory is NaN, so that runs are repeatable."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=_begin)


def _begin() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
