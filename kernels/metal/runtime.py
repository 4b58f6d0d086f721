"""Loads the Metal backend: on an Apple GPU through torch, or in the emulator of this project."""

from __future__ import annotations

from functools import cache, partial

import torch

from kernels.device import KernelsMissing
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels


@cache  # keeps the compiled kernels
def load() -> MetalOps:
    """Return the operations on an Apple GPU. Raises KernelsMissing."""
    if not torch.backends.mps.is_available():
        raise KernelsMissing("this machine has no Apple GPU that torch can use")
    return MetalOps(Kernels(torch.mps.compile_shader))


@cache
def load_emulated(*, checked: bool = False) -> MetalOps:
    """Return the same operations in the emulator; `checked` also finds races and accesses out of bounds, and is slower.

    Raises KernelsMissing.
    """
    from kernels.metal.emulator import (
        Compiler,
        CompilerMissing,
        compile_shader,
    )  # imported here, as servers do not need it

    try:
        Compiler.find().check(checked=checked)
    except CompilerMissing as error:
        raise KernelsMissing(str(error)) from None
    return MetalOps(Kernels(partial(compile_shader, checked=checked)))
