"""Loads the library of C++ operations for an instruction set, of those that setup.py has built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.backend import CpuOps
from kernels.cpu.instruction_sets import usable_instruction_sets
from kernels.device import KernelsMissing

FOLDER = Path(__file__).parent


def load(name: str) -> CpuOps:
    """Return the operations for an instruction set. Raises KernelsMissing if this machine cannot run or load them."""
    if name not in usable_instruction_sets():
        raise KernelsMissing(f"this machine has no {name}")
    library = FOLDER / f"_{name}.so"
    if not library.is_file():
        raise KernelsMissing(f"{library.name} was not built: install a C++ compiler, then install the project again")
    try:
        torch.ops.load_library(library)
    except OSError as error:  # built for another torch
        raise KernelsMissing(f"{library.name} cannot be loaded, so install the project again: {error}") from None
    operations = getattr(torch.ops, f"kvmux_{name}")
    if not operations.usable():
        raise KernelsMissing(f"the system does not let processes use {name}")
    return CpuOps(operations, getattr(torch.classes, f"kvmux_{name}"))


def find_memory_reader() -> Callable[[Tensor], object] | None:
    """Return a function that reads all memory of a tensor as fast as possible; None if no library is installed."""
    for name in usable_instruction_sets():
        with suppress(KernelsMissing):
            load(name)
            read: Callable[[Tensor], object] = getattr(torch.ops, f"kvmux_{name}").read
            return read
    return None
