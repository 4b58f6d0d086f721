"""Loads the Metal backend: on an Apple GPU through torch, or on a CPU in the emulator, a package of its own."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from kernels.device import KernelsMissing
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels

HOW_TO_INSTALL = "in a copy of kvmux's repository, run pip install ./metal_emulator"


@cache  # keeps the compiled kernels
def load() -> MetalOps:
    """Return the operations on an Apple GPU. Raises KernelsMissing if this machine has none that torch can use."""
    if not torch.backends.mps.is_available():
        raise KernelsMissing("this machine has no Apple GPU that torch can use")
    return MetalOps(Kernels(torch.mps.compile_shader), _commit_launches)


def _commit_launches() -> None:
    """Commit what torch has encoded: without that, the GPU begins only when the host waits for it (MPSStream.mm)."""
    torch.mps.Event().record()


def register_emulated_device() -> None:
    """Let torch create tensors on the emulated device. Raises KernelsMissing if the emulator is not installed."""
    _import_emulator().register_device()


def _import_emulator() -> Any:
    try:
        return import_module("metal_emulator")
    except ModuleNotFoundError:
        raise KernelsMissing(f"the Metal emulator is not installed: {HOW_TO_INSTALL}") from None


@cache
def load_emulated(*, checked: bool = False) -> MetalOps:
    """Return the Metal operations, run on the CPU by the emulator.

    `checked`: data races and accesses out of bounds are detected, which makes them slower. Raises KernelsMissing if the
    emulator is not installed, or has no C++ compiler.
    """
    emulator = _import_emulator()
    try:
        emulator.Compiler.find().check(checked=checked)
    except emulator.CompilerMissing as error:
        raise KernelsMissing(str(error)) from None
    return MetalOps(Kernels(partial(emulator.compile_shader, checked=checked)))
