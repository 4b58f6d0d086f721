"""The formats in which keys and values are stored: as they were computed, or as integers of 8 or 4 bits with scales.

A vector is the key or the value of one token in one KV head. Its D numbers are stored as

    as computed | D numbers
    int8        | D bytes | scale: float32                             number = integer * scale
    int4        | D / 2 bytes | two scales for each group: bfloat16    number = (integer - 8) * scale

int8: integers are -127 .. 127; the number of the largest magnitude in the vector becomes 127 or -127.

int4: integers are 0 .. 15, in groups of 64; the last group of a vector may be shorter. In the n / 2 bytes of a group of
n, byte j holds integer j in its low four bits and integer n / 2 + j in its high four bits. Each half of a group has a
scale, as in llama.cpp's q4_0: the number of the largest magnitude becomes integer 0, which stands for -8 * scale. If
there are two such numbers, this is the negative one.

A format may be `rotated`: before it is rounded, a vector is multiplied by a Hadamard matrix, which spreads outliers
over all of its numbers (QuaRot: Ashkboos et al. 2024, arXiv:2404.00456). Attention rotates queries by the same matrix,
which leaves their products with keys as they are, and rotates its weighted sums of rotated values back.

Quantized keys may be `centered`: a fixed vector of the layer and head, the mean of its keys over a sample of tokens
(`LayerSpec.k_mean`), is subtracted before a key is rotated and rounded, which leaves smaller numbers to round ("smooth
K" in SageAttention: Zhang et al. 2024, arXiv:2410.02367). Attention need not add it back: a query's product with that
vector is added to the scores of all keys alike, and softmax drops it. `Plane.decode` returns keys with it.

A vector (int8) or half of a group (int4) with a number that is NaN or infinite is read as NaN throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]  # names the format int4; torch cannot compute with it
GROUP = 64  # integers in a group of int4
MIN_SCALE = 1e-30  # least divisor in rounding, so that equal numbers are not divided by 0
SCALE = torch.float32  # dtype of the scale of an int8 vector
HALF_SCALE = torch.bfloat16  # dtype of the scale of half a group of int4: it has the range of float32

Index = Tensor | tuple[Tensor, ...]


class KVFormat(NamedTuple):
    """The format of keys, or of values."""

    dtype: torch.dtype  # of the numbers: a float dtype, torch.int8, or UINT4
    rotated: bool = False
    centered: bool = False  # of quantized keys: minus `LayerSpec.k_mean`, in layers that have one

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are rounded to integers."""
        return not self.dtype.is_floating_point

    @property
    def read_dtype(self) -> torch.dtype:
        """The dtype in which vectors are read."""
        return torch.float32 if self.is_quantized else self.dtype

    @property
    def divisor(self) -> int:
        """The number of which a head dimension must be a multiple, so that scales are aligned."""
        return {torch.int8: 4, UINT4: 8}.get(self.dtype, 1)

    def compute_vector_bytes(self, dim: int) -> int:
        """Return the bytes of one token's key or value in one head, its scales included."""
        assert dim % self.divisor == 0, "scales would not be aligned"
        if self.dtype is UINT4:
            return dim // 2 + 2 * count_groups(dim) * HALF_SCALE.itemsize
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


INT8 = KVFormat(torch.int8)
INT4 = KVFormat(UINT4, rotated=True)


class KVFormats(NamedTuple):
    """The formats of the keys and of the values of a store."""

    k: KVFormat
    v: KVFormat

    @property
    def are_quantized(self) -> bool:
        """Whether keys or values are rounded to integers."""
        return self.k.is_quantized or self.v.is_quantized

    def __str__(self) -> str:
        return f"keys: {self.k}; values: {self.v}"


class Plane(NamedTuple):
    """Stored keys or values: those of one layer in all blocks, [blocks, H, block_size, D], or some of them [..., D].

    If there is a center, `encode` and `decode` take vectors [..., H, D] of all heads of the layer.
    """

    format: KVFormat
    numbers: Tensor  # [..., D]; of int4, bytes [..., D / 2]
    scale: Tensor | None = None  # of int8 [...]; of int4 [..., groups, 2]
    center: Tensor | None = None  # [H, D] float32: what was subtracted from the vectors of each head; None: nothing

    @property
    def parts(self) -> list[Tensor]:
        """The numbers, and the scales if there are any."""
        return [part for part in (self.numbers, self.scale) if part is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> Plane:
        """Return a plane with each part changed."""
        return self._replace(numbers=change(self.numbers), scale=None if self.scale is None else change(self.scale))

    def take_head(self, head: int) -> Plane:
        """Return the plane with the center of one head, [1, D]: for blocks that hold a single head."""
        return self if self.center is None else self._replace(center=self.center[head : head + 1])

    def select(self, index: Index) -> Plane:
        """Return copies of the vectors at an index into the dimensions before D."""
        return self.map(lambda part: part[index])

    def write(self, index: Index, vectors: Plane) -> None:
        """Store encoded vectors of the same format at an index into the dimensions before D."""
        assert vectors.format == self.format
        for part, new in zip(self.parts, vectors.parts, strict=True):
            part[index] = new

    def encode(self, x: Tensor) -> Plane:
        """Return vectors x [..., H, D] as this plane stores them."""
        if self.center is None:
            return self.format.encode(x)
        return self.format.encode(x.float() - self.center)._replace(center=self.center)

    def read(self) -> Tensor:
        """Return what attention reads, [..., D]: rotated and centered as stored; float32, if they are quantized."""
        if self.scale is None:
            return self.numbers
        if self.format.dtype is UINT4:
            return _read_int4(self.numbers, self.scale)
        return self.numbers.float() * self.scale[..., None]

    def decode(self) -> Tensor:
        """Return the keys or values [..., H, D], neither rotated nor centered; float32, if they are quantized."""
        vectors = hadamard(self.read()) if self.format.rotated else self.read()
        return vectors if self.center is None else vectors + self.center

    def decode_blocks(self, blocks: Tensor) -> Tensor:
        """Return the keys or values of some blocks, [blocks, block_size, H, D], like `decode`."""
        return self.select(blocks).map(lambda part: part.transpose(1, 2)).decode()


def as_formats(formats: KVFormats | torch.dtype) -> KVFormats:
    """Return formats as they are, and for a dtype the formats in which keys and values have it and are not rotated."""
    if isinstance(formats, torch.dtype):
        return KVFormats(KVFormat(formats), KVFormat(formats))
    return formats


def count_groups(dim: int) -> int:
    """Return the number of groups of an int4 vector."""
    return -(-dim // GROUP)


def hadamard(x: Tensor) -> Tensor:
    """Multiply vectors x [..., D] float32 by a Hadamard matrix (fast Walsh-Hadamard transform), which keeps their norm.

    Each run of n numbers is multiplied by a matrix of n x n, where n is the largest power of two that divides D. The
    matrix is its own inverse. The order of sums is fixed, so that every backend computes the same bits.
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


def _round_to_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes [..., D / 2], scales [..., groups, 2]); halves are rounded to even."""
    numbers, scales = zip(*(_round_group(group) for group in x.split(GROUP, -1)), strict=True)
    return torch.cat(numbers, -1), torch.stack(scales, -2)


def _round_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bytes [..., n / 2], scales [..., 2]) of groups x [..., n]."""
    halves = x.unflatten(-1, (2, -1))
    least, largest = halves.amin(-1), halves.amax(-1)
    scale = (torch.where(largest > -least, largest, least) / -8).to(HALF_SCALE)
    finite = halves.isfinite().all(-1) & scale.isfinite()
    divisor = scale.float().where(scale.abs() > MIN_SCALE, MIN_SCALE)
    integers = ((halves / divisor[..., None]).round() + 8).clamp(0, 15).where(finite[..., None], 8).to(torch.uint8)
    low, high = integers.unbind(-2)
    return low | (high << 4), scale.where(finite, torch.nan)


def _read_int4(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers [..., D] float32 of bytes [..., D / 2] with scales [..., groups, 2]."""
    groups = []
    for i, both in enumerate(numbers.split(GROUP // 2, -1)):
        halves = torch.stack((both & 15, both >> 4), -2).float() - 8  # [..., 2, n / 2]
        groups.append((halves * scale[..., i, :, None].float()).flatten(-2))
    return torch.cat(groups, -1)
