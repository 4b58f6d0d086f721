"""Finds the library of C++ operations for the instruction set of this machine."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from kernels.cpu.backend import CpuOps

FOLDER = Path(__file__).parent
LIBRARIES = {"AVX512": "avx512", "AVX2": "avx2"}  # by what torch found, or ATEN_CPU_CAPABILITY told it


class KernelsMissing(Exception):
    """There are no C++ operations for this machine; the message says why."""


def instruction_set() -> str:
    """The best that this machine has, in the words of setup.py; "none" if there is no library for it."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    return LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), "none")


def load(name: str | None = None) -> CpuOps:
    """The operations for an instruction set, by default the best. Raises KernelsMissing."""
    name = name or instruction_set()
    library = FOLDER / f"_{name}.so"
    if not library.is_file():
        raise KernelsMissing(f"{library.name} was not built: install a C++ compiler, then run `make install` again")
    try:
        torch.ops.load_library(library)
    except OSError as error:  # built for another torch
        raise KernelsMissing(f"{library.name} cannot be loaded: {error}") from None
    return CpuOps(getattr(torch.ops, f"kvmux_{name}"))
