"""Weights of integers of 8 or 4 bits with a scale and an offset per group of columns, as in checkpoints of MLX.

MLX's uint32 are seen as bytes. Knows neither files nor products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from kernels.memory import concatenate

BITS = (4, 8)
TILE = 1 << 18  # numbers dequantized to float32 at a time: 1 MiB, which stays in the cache


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedTensor:
    """A weight [out, in]: value = scale * number + offset in float32, with a scale and an offset per `group` columns.

    In known checkpoints a group has 32, 64 or 128 columns, or all; for other groups a kernel may call the reference.
    """

    numbers: Tensor  # uint8 [out, in]; for 4 bits [out, in / 2], with the even column in the lower half of a byte
    scale: Tensor  # scale of each group, [out, in / group] float32, float16 or bfloat16; may be negative
    offset: Tensor  # the same
    bits: int  # 4 or 8
    group: int  # columns

    def __post_init__(self) -> None:
        """Raise ValueError unless numbers, scale and offset fit each other: kernels rely on it."""
        parts = self.numbers, self.scale, self.offset
        numbers, scale = self.numbers.shape, self.scale.shape
        if not (
            self.bits in BITS
            and self.group > 0
            and len(numbers) == len(scale) == 2
            and min(*numbers, *scale) > 0
            and scale == self.offset.shape
            and self.shape == (scale[0], scale[1] * self.group)
            and (self.numbers.dtype, self.scale.dtype) == (torch.uint8, self.offset.dtype)
            and self.scale.is_floating_point()
            and (self.numbers.stride(1) == 1 or numbers[1] == 1)
            and len({part.device for part in parts}) == 1
        ):
            found = ", ".join(f"{part.dtype} {[*part.shape]} on {part.device}" for part in parts)
            raise ValueError(
                f"numbers, scale and offset of a weight of {self.bits} bits in groups of {self.group} columns do not "
                f"fit: {found}"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, (out, in)."""
        out, width = self.numbers.shape
        return torch.Size((out, width * 8 // self.bits))

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scale.nbytes + self.offset.nbytes

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return the same weight on a device."""
        return self._map_parts(lambda part: part.to(device))

    def rows(self, which: slice | Tensor) -> QuantizedTensor:
        """Return some rows as a weight of its own: views of them for a slice, copies for indices [n] int64."""
        if isinstance(which, slice):
            return self._map_parts(lambda part: part[which])
        return self._map_parts(lambda part: part.index_select(0, which))  # it refuses negative indices

    def _map_parts(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        return QuantizedTensor(change(self.numbers), change(self.scale), change(self.offset), self.bits, self.group)


def check_format(width: int, bits: int, group: int) -> None:
    """Raise ValueError if rows of `width` columns cannot have numbers of `bits` bits in groups of `group` columns."""
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits are not supported; {' and '.join(map(str, BITS))} bits are")
    if group < 1 or width % group or width * bits % 8:
        raise ValueError(f"groups of {group} do not divide rows of {width} columns")


def count_tile_rows(width: int) -> int:
    """Return how many rows of `width` columns to convert to float32 at a time: about TILE numbers, at least a row."""
    return max(1, TILE // width)


def dequantize(weight: QuantizedTensor) -> Tensor:
    """Return the values of a quantized weight, as float32 [out, in]."""
    numbers = _unpack_numbers(weight.numbers) if weight.bits == 4 else weight.numbers
    grouped = numbers.unflatten(-1, (-1, weight.group)).float()  # numbers by group, float32 [out, in / group, group]
    values: Tensor = grouped.mul_(weight.scale.float()[..., None]).add_(weight.offset.float()[..., None])
    return values.flatten(-2)


def concatenate_quantized(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate the rows of weights without changing their values.

    If their formats differ, the result has the most bits of any of them, and the largest groups that divide all of
    theirs.
    """
    bits, group = max(part.bits for part in parts), gcd(*(part.group for part in parts))
    alike = [_refine(part, bits, group) for part in parts]
    numbers = concatenate([part.numbers for part in alike])
    scale, offset = (torch.cat([getattr(part, name) for part in alike]) for name in ("scale", "offset"))
    return QuantizedTensor(numbers, scale, offset, bits, group)


def _refine(weight: QuantizedTensor, bits: int, group: int) -> QuantizedTensor:
    """Return a weight with the same values, stored in more bits and smaller groups."""
    numbers = _unpack_numbers(weight.numbers) if weight.bits < bits else weight.numbers
    scale, offset = (part.repeat_interleave(weight.group // group, -1) for part in (weight.scale, weight.offset))
    return QuantizedTensor(numbers, scale, offset, bits, group)


def _unpack_numbers(numbers: Tensor) -> Tensor:
    """Unpack uint8 [out, in / 2], with two numbers of 4 bits in each byte, to [out, in]."""
    words = numbers.to(torch.int16)
    return (words | words << 4).bitwise_and_(0x0F0F).view(torch.uint8)
