"""The formats in which keys and values are stored: as they were computed, or as integers of 8 or 4 bits with scales.

A vector is the key or the value of one token in one KV head. Its D numbers are stored as

    as computed | D numbers
    int8        | D bytes | scale: float32                                  a number is worth integer * scale
    int4        | D / 2 bytes | scale and zero of each group: bfloat16      a number is worth integer * scale + zero

Integers of int8 are -127 .. 127, the largest magnitude of the vector being 127. Those of int4 are 0 .. 15, from the
least number of their group to its largest. A group has 64 numbers, the last one of a vector those that are left. Of its
n / 2 bytes, byte j holds integer j in its low four bits and integer n / 2 + j in its high ones.

A format may be `rotated`: before it is rounded, a vector is multiplied by a Hadamard matrix, which spreads outliers
over all of its numbers (QuaRot: Ashkboos et al. 2024, arXiv:2404.00456). Attention rotates queries alike, as products
of rotated vectors are those of the vectors, and rotates its sums of rotated values back.

If a number is NaN or infinite, so is what is read of its vector (int8) or group (int4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # stands for int4; torch computes nothing with it
GROUP = 64  # integers of 4 bits that share a scale and a zero
MIN_SCALE = 1e-30  # least divisor in rounding, so that equal numbers are not divided by 0
SCALE = torch.float32  # dtype of the scale of an int8 vector
GROUP_SCALE = torch.bfloat16  # dtype of the scales and zeros of int4: any float32 stays finite

Index = Tensor | tuple[Tensor, ...]


class KVFormat(NamedTuple):
    """The format of keys, or of values."""

    dtype: torch.dtype  # of the numbers: a float dtype, torch.int8, or UINT4
    rotated: bool = False

    @property
    def is_quantized(self) -> bool:
        return not self.dtype.is_floating_point

    @property
    def divisor(self) -> int:
        """The number of which a head dimension must be a multiple, so that scales are aligned."""
        return {torch.int8: 4, UINT4: 8}.get(self.dtype, 1)

    def compute_vector_bytes(self, dim: int) -> int:
        """Return the bytes of one token's key or value in one head, its scales included."""
        assert dim % self.divisor == 0, "scales would not be aligned"
        if self.dtype is UINT4:
            return dim // 2 + 2 * count_groups(dim) * GROUP_SCALE.itemsize
        return dim * self.dtype.itemsize + (SCALE.itemsize if self.is_quantized else 0)

    def encode(self, x: Tensor) -> Plane:
        """Return vectors x [..., D] as they are stored."""
        if not self.is_quantized:
            return Plane(self, x.to(self.dtype))
        wide = hadamard(x.float()) if self.rotated else x.float()
        return Plane(self, *(_round_to_int8 if self.dtype is torch.int8 else _round_to_int4)(wide))

    def __str__(self) -> str:
        name = {UINT4: "int4"}.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}, rotated" if self.rotated else name


class KVFormats(NamedTuple):
    """The formats of the keys and of the values of a store."""

    k: KVFormat
    v: KVFormat

    def __str__(self) -> str:
        return f"keys: {self.k}; values: {self.v}"


class Plane(NamedTuple):
    """Stored keys or values: those of one layer in all blocks, [blocks, H, block_size, D], or some of them [..., D]."""

    format: KVFormat
    numbers: Tensor  # [..., D]; of int4, bytes [..., D / 2]
    scale: Tensor | None = None  # of int8 [...]; of int4 [..., groups]
    zero: Tensor | None = None  # of int4 [..., groups]

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of which it consists."""
        return [part for part in self[1:] if part is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> Plane:
        """Return a plane with each part changed."""
        return Plane(self.format, *map(change, self.parts))

    def select(self, index: Index) -> Plane:
        """Return copies of some vectors; the index is one into the dimensions before D."""
        return self.map(lambda part: part[index])

    def write(self, index: Index, vectors: Plane) -> None:
        """Write vectors of the same format to some places."""
        assert vectors.format == self.format
        for part, new in zip(self.parts, vectors.parts, strict=True):
            part[index] = new

    def read(self) -> Tensor:
        """Return what the numbers are worth, [..., D]: rotated, if the format is; float32, if they are quantized."""
        if self.zero is not None:
            assert self.scale is not None
            return _read_int4(self.numbers, self.scale, self.zero)
        return self.numbers if self.scale is None else self.numbers.float() * self.scale[..., None]

    def decode(self) -> Tensor:
        """Return the keys or values [..., D], rotated back; float32, if they are quantized."""
        return hadamard(self.read()) if self.format.rotated else self.read()


def as_formats(formats: KVFormats | torch.dtype) -> KVFormats:
    """Return the formats for which a dtype stands: that of keys and values, not rotated."""
    if isinstance(formats, torch.dtype):
        return KVFormats(KVFormat(formats), KVFormat(formats))
    return formats


def count_groups(dim: int) -> int:
    """Return the number of groups of an int4 vector."""
    return -(-dim // GROUP)


def hadamard(x: Tensor) -> Tensor:
    """Multiply vectors x [..., D] float32 by a Hadamard matrix (fast Walsh-Hadamard transform), which keeps their norm.

    The matrix has the size of the largest power of two that divides D; it rotates each run of so many numbers. It is
    its own inverse. The order of sums is fixed, so that every backend computes the same bits.
    """
    size = x.shape[-1] & -x.shape[-1]
    out, half = x.unflatten(-1, (-1, size)), 1
    while half < size:
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    rotated: Tensor = out.flatten(-2) * size**-0.5
    return rotated


# -------------------------------------------------------------------- rounding
def _round_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (integers [..., D], scale [...]); halves are rounded to even, and a vector of zeros has the scale 0."""
    scale = x.abs().amax(-1) / 127
    return (x / scale.clamp_min(MIN_SCALE)[..., None]).round().to(torch.int8), scale


def _round_to_int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bytes [..., D / 2], scales [..., groups], zeros [..., groups]); halves are rounded to even."""
    parts = [_round_group(group) for group in x.split(GROUP, -1)]
    numbers, scales, zeros = zip(*parts, strict=True)
    return torch.cat(numbers, -1), torch.stack(scales, -1), torch.stack(zeros, -1)


def _round_group(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bytes [..., n / 2], scale [...], zero [...]) of groups x [..., n]."""
    least, largest = x.amin(-1), x.amax(-1)
    scale, zero = ((largest - least) / 15).to(GROUP_SCALE), least.to(GROUP_SCALE)
    integers = (x - zero.float()[..., None]) / scale.float().clamp_min(MIN_SCALE)[..., None]
    finite = x.isfinite().all(-1) & scale.isfinite() & zero.isfinite()
    integers = integers.round().clamp(0, 15).where(finite[..., None], 0).to(torch.uint8)
    low, high = integers.chunk(2, -1)
    return low | (high << 4), scale.where(finite, torch.nan), zero.where(finite, torch.nan)


def _read_int4(numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return what bytes [..., D / 2] with scales and zeros [..., groups] are worth, [..., D] float32."""
    groups = []
    for i, both in enumerate(numbers.split(GROUP // 2, -1)):
        integers = torch.cat((both & 15, both >> 4), -1)
        groups.append(integers.float() * scale[..., i, None].float() + zero[..., i, None].float())
    return torch.cat(groups, -1)
