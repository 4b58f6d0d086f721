"""Calls compiled kernels as those of `torch.mps.compile_shader` are called: grids in threads, structs as tuples.

Knows neither compiler nor GPU: a launcher takes the addresses of a kernel's parameters.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate, product

from torch import Tensor

from kernels.metal.library import Argument

Size = tuple[int, int, int]
Launcher = Callable[[Size, Size, int], None]  # takes numbers of threadgroups, of their threads, address of parameters
GetLauncher = Callable[[str], Launcher]  # raises RuntimeError if there is no kernel of that name

MAX_GROUPS = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # of a launch, in three directions
INLINE_BYTES = 2048  # bytes that a kernel takes for an argument `constant T*`; as in metal_stdlib
_ALIGNMENT = 8


class CudaKernel:
    """A compiled kernel, whose parameters are those of the Metal kernel's buffers and a struct Launch."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def __call__(self, *arguments: Argument, threads: Size, group_size: Size, arg_casts: Container[int]) -> None:
        """Enqueue the kernel for `threads` threads in groups of `group_size`.

        Integers are passed as int32 if `arg_casts` has their argument's number, otherwise as int64.
        """
        packed = [_pack(argument, "i" if i in arg_casts else "q") for i, argument in enumerate(arguments)]
        x, y, z = (-(-n // size) for n, size in zip(threads, group_size, strict=True))
        for first, count in _split((x, y, z)):
            parameters = _PackedParameters([*packed, struct.pack("6I", *threads, *first)])
            self._launch(count, group_size, parameters.address)


class CudaLibrary:
    """The kernels of a source, each an attribute of this object."""

    def __init__(self, get_launcher: GetLauncher) -> None:
        self._get_launcher = get_launcher

    def __getattr__(self, name: str) -> CudaKernel:
        try:
            return CudaKernel(self._get_launcher(name))
        except RuntimeError as error:
            raise AttributeError(f"there is no kernel {name}: {error}") from None


class _PackedParameters:
    """The parameters of a launch in memory; CUDA copies as many bytes of each as the kernel declares."""

    def __init__(self, values: Sequence[bytes]) -> None:
        padded = [value.ljust(-(-len(value) // _ALIGNMENT) * _ALIGNMENT, b"\0") for value in values]
        *begins, end = accumulate(map(len, padded), initial=0)
        self._memory = ctypes.create_string_buffer(b"".join(padded), end + INLINE_BYTES)
        base = ctypes.addressof(self._memory)
        self._addresses = (ctypes.c_void_p * len(begins))(*(base + begin for begin in begins))
        self.address = ctypes.addressof(self._addresses)


def _pack(argument: Argument, integer: str) -> bytes:
    """Return the bytes of a kernel's parameter: an address, a number or a struct of numbers."""
    if isinstance(argument, Tensor):
        return struct.pack("Q", argument.data_ptr())
    values = argument if isinstance(argument, Sequence) else (argument,)
    packed = struct.pack(f"{len(values)}{integer if isinstance(values[0], int) else 'f'}", *values)
    assert len(packed) <= INLINE_BYTES
    return packed


def _split(groups: Size) -> Iterator[tuple[Size, Size]]:
    """Yield (first threadgroup, number of threadgroups) of each launch that a grid takes; mostly it takes one."""
    for x, y, z in product(*(range(0, n, most) for n, most in zip(groups, MAX_GROUPS, strict=True))):
        left = (n - first for n, first in zip(groups, (x, y, z), strict=True))
        width, height, depth = map(min, left, MAX_GROUPS)
        yield (x, y, z), (width, height, depth)
