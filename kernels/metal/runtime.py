"""Loads the Metal backend: on an Apple GPU through torch, or on a CPU in the emulator of this project."""

from __future__ import annotations

from functools import cache, partial

import torch

from kernels.device import KernelsMissing
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels


@cache  # keeps the compiled kernels
def load() -> MetalOps:
    """Return the operations on an Apple GPU. Raises KernelsMissing if this machine has none that torch can use."""
    if not torch.backends.mps.is_available():
        raise KernelsMissing("this machine has no Apple GPU that torch can use")
    return MetalOps(Kernels(torch.mps.compile_shader))


@cache
def load_emulated(*, checked: bool = False) -> MetalOps:
    """Return the Metal operations, run on the CPU by the emulator.

    `checked`: data races and accesses out of bounds are detected, which makes them slower. Raises KernelsMissing if the
    emulator has no C++ compiler.
    """
    from kernels.metal.emulator import (
        Compiler,
        CompilerMissing,
        compile_shader,
    )  # the emulator is imported here, as only few servers need it

    try:
        Compiler.find().check(checked=checked)
    except CompilerMissing as error:
        raise KernelsMissing(str(error)) from None
    return MetalOps(Kernels(partial(compile_shader, checked=checked)))
