"""Metal's scalar types, and the torch dtypes that may be bound to them. Knows neither sources nor launches."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scalar(NamedTuple):
    """A scalar type of Metal; its vectors and atomics are described by it, too."""

    name: str
    dtypes: tuple[torch.dtype, ...] = ()  # dtypes of the tensors that may be bound to it
    is_float: bool = False

    @property
    def size(self) -> int:
        """The size of the type in bytes."""
        return self.dtypes[0].itemsize


_8_BITS = (torch.int8, torch.uint8, torch.bool)
_16_BITS = (torch.int16, torch.uint16)
_32_BITS = (torch.int32, torch.uint32)
_64_BITS = (torch.int64, torch.uint64)
SCALARS = (  # scalar types; their indices are the codes in include/emulated/binding.h
    Scalar("void"),  # also stands for a struct: a tensor of any dtype may be bound to it
    Scalar("float", (torch.float32,), is_float=True),
    Scalar("half", (torch.float16,), is_float=True),
    Scalar("bfloat", (torch.bfloat16,), is_float=True),
    Scalar("char", _8_BITS),
    Scalar("uchar", _8_BITS),
    Scalar("short", _16_BITS),
    Scalar("ushort", _16_BITS),
    Scalar("int", _32_BITS),
    Scalar("uint", _32_BITS),
    Scalar("long", _64_BITS),
    Scalar("ulong", _64_BITS),
    Scalar("bool", _8_BITS),
)
