"""Compiled kernels, called like those of torch.mps.compile_shader, but with tensors on the CPU.

A call returns when all threads of the launch have ended. Only one launch runs at a time; others wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from metal_emulator.arguments import Buffer, InlineValues, Parameter, get_cast
from metal_emulator.build import BuiltLibraries, find_source_line
from metal_emulator.failure import Failure, FailureReporter, Fault, KernelFault
from metal_emulator.translation import MAX_BUFFERS, KernelSource, Translation

_MAX_GRID = 2**32 - 1  # threads, in each direction


class Order(IntEnum):
    """The order in which the threads of a threadgroup, and the threadgroups of a launch, run."""

    FORWARD = 0
    REVERSED = 1
    RANDOM = 2


@dataclass(frozen=True)
class Stats:
    """The statistics of a launch: its size, its memory, switches between threads, and checked accesses."""

    threads: int
    groups: int
    switches: int  # switches from one thread's stack (fiber) to another's
    threadgroup_bytes: int
    accesses: int  # accesses to memory that were checked; 0 in an unchecked build


@dataclass(frozen=True)
class Mode:
    """How the kernels of a library run: checked or not, and in which order of threads."""

    checked: bool
    order: Order
    seed: int


class _Launch(ctypes.Structure):
    """A launch for the runtime: the same fields as the C++ struct emulator::Launch."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p * MAX_BUFFERS),
        ("bytes", ctypes.c_uint64 * MAX_BUFFERS),
        ("writable", ctypes.c_uint8 * MAX_BUFFERS),
        ("arguments", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("group", ctypes.c_uint * 3),
        ("order", ctypes.c_int),
        ("checked", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    """What the runtime reports of a launch: the same fields as the C++ struct emulator::Report."""

    _fields_ = (
        ("switches", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("failure", Failure),
    )


class Library:
    """The kernels of a Metal source: each is an attribute; dir() lists them."""

    def __init__(self, built: BuiltLibraries, translation: Translation, mode: Mode) -> None:
        self._built, self._mode = built, mode
        self._loaded, runtime = built.load()
        self._launch = runtime.emulator_launch
        self._launch.restype = None
        self._kernels_by_name = {kernel.name: (i, kernel) for i, kernel in enumerate(translation.kernels)}

    def __getattr__(self, name: str) -> EmulatedKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._kernels_by_name:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        number, source = self._kernels_by_name[name]
        kernel = EmulatedKernel(self._launch, self._loaded, number, source, self._mode, self._built.kernels)
        setattr(self, name, kernel)  # from now on Python finds the attribute without calling __getattr__
        return kernel

    def __dir__(self) -> Iterable[str]:
        return list(self._kernels_by_name)


class EmulatedKernel:
    """A compiled kernel, to be called; `stats` has the statistics of its latest launch."""

    thread_execution_width = 32

    def __init__(
        self,
        launch: Any,  # emulator_launch
        loaded: ctypes.CDLL,
        number: int,
        source: KernelSource,
        mode: Mode,
        path: Path,
    ) -> None:
        self.name = source.name
        self.max_threads_per_threadgroup = source.max_threads
        self.stats: Stats | None = None
        self._mode, self._variables, self._path = mode, source.variables, path
        self._launch = launch
        self._entry = ctypes.cast(getattr(loaded, f"emulator_kernel_{number}"), ctypes.c_void_p).value
        self._buffers = _describe_buffers(getattr(loaded, f"emulator_describe_{number}"), source)

    @property
    def static_thread_group_memory_length(self) -> int:
        """The bytes of threadgroup memory that the latest launch used; 0 before the first launch."""
        return self.stats.threadgroup_bytes if self.stats else 0

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        """Run the kernel on `threads` threads in all, by default one for each element of the first tensor.

        Raises TypeError, ValueError or RuntimeError for wrong arguments, and KernelFault if the kernel does something
        invalid.
        """
        launch, report = _Launch(), _Report()
        kept = self._bind_arguments(launch, args, arg_casts)
        grid, group = self._resolve_launch_size(_resolve_threads(threads, args), group_size)
        launch.entry, launch.arguments = self._entry, len(args)
        launch.grid[:], launch.group[:] = grid, group
        launch.order, launch.checked, launch.seed = self._mode.order, self._mode.checked, self._mode.seed
        self._launch(ctypes.byref(launch), ctypes.byref(report))
        del kept
        groups = [-(-each // size) for each, size in zip(grid, group, strict=True)]
        self.stats = Stats(
            threads=grid[0] * grid[1] * grid[2],
            groups=groups[0] * groups[1] * groups[2],
            switches=report.switches,
            threadgroup_bytes=report.threadgroup_bytes,
            accesses=report.accesses,
        )
        if report.failure.fault != Fault.NONE:
            raise KernelFault(f"{self.name}: {self._make_reporter(grid, group).format_failure(report.failure)}")

    def _bind_arguments(
        self, launch: _Launch, args: tuple[Any, ...], casts: str | Mapping[int, str] | None
    ) -> InlineValues | None:
        """Write the addresses of the arguments into a launch; return their memory, to be kept until the launch ends."""
        if len(args) != len(self._buffers):
            names = ", ".join(buffer.name for buffer in self._buffers)
            raise TypeError(f"{self.name} takes {len(self._buffers)} arguments ({names}), not {len(args)}")
        packed: dict[int, bytes] = {}
        for i, (buffer, value) in enumerate(zip(self._buffers, args, strict=True)):
            if isinstance(value, Tensor):
                launch.buffers[i], launch.bytes[i] = buffer.bind_tensor(value)
                launch.writable[i] = buffer.writable
            else:
                packed[i] = buffer.pack(value, get_cast(casts, i))
        if not packed:
            return None
        inline = InlineValues(list(packed.values()))
        for address, (i, value) in zip(inline.addresses, packed.items(), strict=True):
            launch.buffers[i], launch.bytes[i] = address, len(value)
        return inline

    def _resolve_launch_size(
        self, threads: Sequence[int], group_size: int | Sequence[int] | None
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return (size of the grid, size of a threadgroup), in threads and three dimensions."""
        max_threads = self.max_threads_per_threadgroup
        if group_size is None:
            group: Sequence[int] = [
                min(threads[0], max_threads) if len(threads) == 1 else max_threads,
                *[1] * (len(threads) - 1),
            ]
        else:
            group = [group_size] if isinstance(group_size, int) else group_size
        if len(group) != len(threads):
            raise RuntimeError(f"{self.name}: threads and group_size must have same number of dimensions")
        if min(threads) < 1 or min(group) < 1:
            raise ValueError(f"{self.name}: an empty grid: threads {tuple(threads)}, group_size {tuple(group)}")
        if max(threads) > _MAX_GRID:
            raise ValueError(f"{self.name}: threads {tuple(threads)}: at most {_MAX_GRID} in each direction")
        grid3, group3 = _pad_to_3d(threads), _pad_to_3d(group)
        if group3[0] * group3[1] * group3[2] > max_threads:
            raise ValueError(f"{self.name}: Threadgroup size exceeds {max_threads} limit")
        return grid3, group3

    def _make_reporter(self, grid: tuple[int, int, int], group: tuple[int, int, int]) -> FailureReporter:
        arguments = [(buffer.name, buffer.size) for buffer in self._buffers]
        return FailureReporter(arguments, self._variables, grid, group, partial(find_source_line, self._path))


def _describe_buffers(describe: Any, source: KernelSource) -> list[Buffer]:
    found = (Parameter * 64)()
    count = describe(found)
    buffers = [Buffer(source.name, source.buffers[each.buffer], each) for each in found[:count] if each.buffer >= 0]
    return sorted(buffers, key=lambda buffer: buffer.index)


def _resolve_threads(threads: int | Sequence[int] | None, args: tuple[Any, ...]) -> Sequence[int]:
    if threads is None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        threads = tensors[0].numel() if tensors else None
    if isinstance(threads, int):
        return [threads]
    if threads is None or not 1 <= len(threads) <= 3:
        raise RuntimeError("Number of threads is undefined or has wrong dimension")
    return threads


def _pad_to_3d(size: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z
