"""Metal kernels are tested where there is a C++ compiler: without one all others still pass."""

from __future__ import annotations

from kernels.metal.emulator import CompilerMissing
from kernels.metal.emulator.build import Compiler

try:
    Compiler.find()
    collect_ignore_glob: list[str] = []
except CompilerMissing:
    collect_ignore_glob = ["test_*.py"]
