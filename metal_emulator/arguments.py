"""Converts the arguments of a launch to addresses, as torch.mps binds them: argument i is buffer i.

A tensor is bound where its view begins; a Python number or a list of them becomes bytes. Stricter than torch, which
checks next to nothing: an argument of another type than the kernel reads is refused.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metal_emulator.device import DEVICE
from metal_emulator.scalars import SCALARS

MAX_BYTES = 4096  # most bytes of a number or list of numbers as an argument
_ALIGNMENT = 16
_FORMATS = {"int32": "i", "int16": "h", "int8": "b", "uint8": "B", "fp16": "e", "bf16": "f"}


class Parameter(ctypes.Structure):
    """A parameter of a kernel, described by its C++ type; the same fields as the C++ struct emulator::Parameter."""

    _fields_ = (
        ("buffer", ctypes.c_int),
        ("reference", ctypes.c_int),
        ("element", ctypes.c_int),
        ("size", ctypes.c_int),
        ("alignment", ctypes.c_int),
        ("writable", ctypes.c_int),
    )


class Buffer:
    """A parameter of a kernel that is a buffer, to which an argument is bound."""

    def __init__(self, kernel: str, name: str, parameter: Parameter) -> None:
        self.name = name
        self.index, self._scalar = parameter.buffer, SCALARS[parameter.element]
        self.size, self.alignment = parameter.size, parameter.alignment
        self.reference, self.writable = bool(parameter.reference), bool(parameter.writable)
        words = self._scalar.name == "uint" and self.size > 4 and not self.reference
        # Tensors of any dtype may be bound to uint4*, with which kernels move bytes.
        self._dtypes = () if words else self._scalar.dtypes
        self._label = f"{kernel}: argument {self.index} '{name}'"

    def bind_tensor(self, tensor: Tensor) -> tuple[int, int]:
        """Return the address of a tensor, and the bytes from its first to its last element.

        Raises TypeError for another device or dtype, ValueError for a misaligned tensor or too few bytes.
        """
        if tensor.device.type not in ("cpu", DEVICE.type):
            raise TypeError(f"{self._label}: the emulator takes tensors on the CPU or {DEVICE}, not on {tensor.device}")
        if self._dtypes and tensor.dtype not in self._dtypes:
            raise TypeError(f"{self._label}: the kernel reads {self._scalar.name}, not {tensor.dtype}")
        address, bytes_ = tensor.data_ptr(), extent_bytes(tensor)
        if address % self.alignment:
            raise ValueError(
                f"{self._label}: begins {address % self.alignment} bytes off a multiple of {self.alignment}"
            )
        if self.reference and bytes_ < self.size:
            raise ValueError(f"{self._label}: has {bytes_} bytes, but the kernel reads {self.size}")
        return address, bytes_

    def pack(self, value: Any, cast: str) -> bytes:
        """Pack a number, or a list of numbers, into bytes as torch passes it.

        `cast` is the type to pack as, "" for torch's default. Raises RuntimeError for what torch refuses, and TypeError
        or ValueError for bytes that do not fit the parameter.
        """
        if isinstance(value, (tuple, list)):
            if not value:
                raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
            values, kind = value, type(value[0])
        else:
            values, kind = [value], type(value)
        if not issubclass(kind, (int, float)):
            raise RuntimeError(f"{self._label}: Unsupported argument type {kind.__name__}")
        if cast and cast not in _FORMATS:
            raise RuntimeError(f"{self._label}: Unsupported cast instruction {cast}: use one of {', '.join(_FORMATS)}")
        packed = _pack_numbers(values, cast or ("int64" if issubclass(kind, int) else "float"), self._label)
        self._check_bytes(packed, len(values), cast or kind.__name__)
        return packed

    def _check_bytes(self, packed: bytes, count: int, kind: str) -> None:
        if self.writable:
            raise TypeError(f"{self._label} is written to, so it must be a tensor")
        if len(packed) > MAX_BYTES:
            raise ValueError(
                f"{self._label}: {len(packed)} bytes, but Metal passes at most {MAX_BYTES} by value: use a tensor"
            )
        if self._scalar.dtypes:
            self._check_numbers(len(packed) // count, count, kind)
        if self.reference and len(packed) < self.size:
            raise TypeError(f"{self._label}: {len(packed)} bytes are passed, but the kernel reads {self.size}")

    def _check_numbers(self, number_bytes: int, count: int, kind: str) -> None:
        scalar = self._scalar
        if (kind in ("float", "fp16", "bf16")) != scalar.is_float:
            raise TypeError(f"{self._label}: the kernel reads {scalar.name}, not {kind}")
        # An integer that is passed alone may have eight bytes where the kernel reads four, as those are its low bytes.
        lone = count == 1 and kind in ("int", "bool") and self.reference and self.size == scalar.size
        if not lone and number_bytes != scalar.size:
            raise TypeError(
                f"{self._label}: the kernel reads {scalar.name}, not {number_bytes} bytes each: "
                "use arg_casts or a tensor"
            )


def extent_bytes(tensor: Tensor) -> int:
    """Return the number of bytes from a view's first element to the end of its last one; 0 for an empty view."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def get_cast(arg_casts: str | Mapping[int, str] | None, index: int) -> str:
    """Return the type to which argument number `index` is cast; "" if it is not cast."""
    if arg_casts is None:
        return ""
    return arg_casts if isinstance(arg_casts, str) else arg_casts.get(index, "")


class InlineValues:
    """Memory for the numbers that are arguments of one launch, aligned as Metal aligns them."""

    def __init__(self, values: list[bytes]) -> None:
        """Store the values one after the other; the attribute `addresses` has the address of each."""
        room = sum(-(-len(value) // _ALIGNMENT) * _ALIGNMENT for value in values) + _ALIGNMENT
        self._memory = ctypes.create_string_buffer(room)
        begin = ctypes.addressof(self._memory)
        at = begin + -begin % _ALIGNMENT
        self.addresses = []
        for value in values:
            ctypes.memmove(at, value, len(value))
            self.addresses.append(at)
            at += -(-len(value) // _ALIGNMENT) * _ALIGNMENT


def _pack_numbers(values: list[Any] | tuple[Any, ...], cast: str, what: str) -> bytes:
    try:
        if cast == "bf16":
            return bytes(torch.tensor(values, dtype=torch.bfloat16).view(torch.uint8).tolist())
        form = {"int64": "q", "float": "f"}.get(cast) or _FORMATS[cast]
        numbers = [int(value) for value in values] if form in "qihbB" else values
        return struct.pack(f"{len(values)}{form}", *numbers)
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: {values} cannot be passed as {cast}: {error}") from None
