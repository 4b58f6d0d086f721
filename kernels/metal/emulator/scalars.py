"""Metal's scalar types, and the torch dtypes that may be bound to them. Knows neither sources nor launches."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scalar(NamedTuple):
    """A scalar type; also stands for its vectors and atomics."""

    name: str
    dtypes: tuple[torch.dtype, ...] = ()  # of tensors that may be bound to it
    is_float: bool = False

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.dtypes[0].itemsize


_8_BITS = (torch.int8, torch.uint8, torch.bool)
_16_BITS = (torch.int16, torch.uint16)
_32_BITS = (torch.int32, torch.uint32)
_64_BITS = (torch.int64, torch.uint64)
SCALARS = (  # indexed by the codes in include/emulated/binding.h
    Scalar("void"),  # also a struct: any tensor may be bound to it
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
