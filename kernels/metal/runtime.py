"""Finds Metal: Apple's own through torch, or the emulator of this project."""

from __future__ import annotations

from functools import cache, partial

import torch

from kernels.device import KernelsMissing
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels


@cache  # with all that they have compiled
def load() -> MetalOps:
    """Return the operations on an Apple device. Raises KernelsMissing."""
    if not torch.backends.mps.is_available():
        raise KernelsMissing("this machine has no Apple device that torch can use")
    return MetalOps(Kernels(torch.mps.compile_shader))


@cache
def load_emulated(*, checked: bool = False) -> MetalOps:
    """Return the same kernels on the CPU; `checked` looks for races and bounds, slower. Raises KernelsMissing."""
    from kernels.metal.emulator import Compiler, CompilerMissing, compile_shader  # here, as a server starts without it

    try:
        Compiler.find().check(checked=checked)
    except CompilerMissing as error:
        raise KernelsMissing(str(error)) from None
    return MetalOps(Kernels(partial(compile_shader, checked=checked)))
