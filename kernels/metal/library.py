"""Compiles kernels when they are first used, each source once per set of types, and keeps them.

Knows neither what a kernel computes nor on which device: `compile_shader` is that of torch.mps, of the emulator or of
kernels/cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.metal.source import assemble_source

Argument = Tensor | float | Sequence[int] | Sequence[float]


class Grid(NamedTuple):
    """The number of threads of a launch, and that of each threadgroup, in three dimensions."""

    threads: tuple[int, int, int]
    group: tuple[int, int, int]


class Longs(tuple[int, ...]):
    """A struct of 64-bit integers, as an argument of a kernel: for numbers that may be 2^31 or more."""

    __slots__ = ()


class Kernel:
    """A compiled kernel.

    Integer arguments are passed as int32, or as int64 if they are in `Longs`; a sequence is passed as a struct.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, grid: Grid, *arguments: Argument) -> None:
        """Enqueue the kernel without waiting for it. If the grid has no threads, nothing is launched."""
        if 0 in grid.threads:
            return
        casts = {i: "int32" for i, argument in enumerate(arguments) if _is_integer(argument)}
        self._function(*arguments, threads=grid.threads, group_size=grid.group, arg_casts=casts)


def _is_integer(argument: Argument) -> bool:
    """Return whether an argument must be cast to int32; otherwise torch would pass its integers as int64."""
    if isinstance(argument, Longs):
        return False
    return isinstance(argument[0] if isinstance(argument, (tuple, list)) else argument, int)


class Kernels:
    """Compiles Metal kernels when they are first requested, and keeps them by file, name and types."""

    def __init__(self, compile_shader: Callable[[str], Any]) -> None:
        self._compile_shader = compile_shader
        self._libraries: dict[tuple[object, ...], Any] = {}
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def get(self, file: str, name: str, **types: torch.dtype) -> Kernel:
        """Return the kernel `name` of a source file, compiled for these types."""
        key = (file, name, *types.items())
        if key not in self._kernels:
            self._kernels[key] = Kernel(getattr(self._get_library(file, types), name))
        return self._kernels[key]

    def _get_library(self, file: str, types: Mapping[str, torch.dtype]) -> Any:
        key = (file, *types.items())
        if key not in self._libraries:
            self._libraries[key] = self._compile_shader(assemble_source(file, types))
        return self._libraries[key]
