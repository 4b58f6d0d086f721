"""Runs Metal compute kernels on a CPU: replaces torch.mps.compile_shader, and also detects errors of kernels.

The file README.md in this folder says how.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath

from metal_emulator import rules
from metal_emulator.build import Compiler, CompilerMissing
from metal_emulator.device import DEVICE, register_device
from metal_emulator.failure import KernelFault
from metal_emulator.library import EmulatedKernel, Library, Mode, Order, Stats
from metal_emulator.tokens import Source
from metal_emulator.translation import Translator

__all__ = [
    "DEVICE",
    "Compiler",
    "CompilerMissing",
    "EmulatedKernel",
    "KernelFault",
    "Library",
    "Order",
    "Stats",
    "compile_shader",
    "register_device",
]


def compile_shader(
    source: str,
    *,
    checked: bool = False,
    order: Order = Order.FORWARD,
    seed: int = 0,
    include: Iterable[str | PathLike[str]] = (),
    ucontext: bool = False,
) -> Library:
    """Return the kernels of a Metal source, to be called with tensors on the CPU or on `DEVICE`.

    `checked`: every access to memory is checked, which makes kernels many times slower. `order`: in which order the
    threads of a threadgroup, and the threadgroups, run; `seed` is used for Order.RANDOM. `include`: folders in which
    #include finds headers. `ucontext`: switch threads by the C library, as on processors for which there is no faster
    way.

    Raises SyntaxError with the line (as #line counts it) if the source is not valid Metal, and CompilerMissing if there
    is no C++ compiler.
    """
    rules.check_text(source)
    compiler = Compiler.find()
    expanded = Source(compiler.preprocess(source, tuple(fspath(folder) for folder in include)))
    rules.check(expanded)
    translation = Translator(expanded).translate()
    built = compiler.build_library(translation.text, checked=checked, ucontext=ucontext)
    return Library(built, translation, Mode(checked, order, seed))
