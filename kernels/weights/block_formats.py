"""Weights in the block formats of GGUF files, held as the bytes of the file, and what each format consists of.

A row of a matrix is a row of blocks of 32 or 256 columns. The values are those of `gguf.quants.dequantize`. Knows
neither files nor products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import gguf
import torch
from torch import Tensor


class BitField(NamedTuple):
    """Some bits of all numbers of a block, packed in bytes.

    Each run of `run` bytes has the bits of the next `run` numbers in its lowest bits, then those of the next ones.
    """

    start: int  # of its bytes in the block
    run: int  # bytes
    bits: int  # of a number


class BlockFormat(NamedTuple):
    """A block format: how its numbers and scales are stored, and in which groups of columns."""

    name: str  # in GGUF files
    low: BitField  # the lower bits of the numbers
    high: BitField | None = None  # the bits above them
    zero: int = 0  # the number that stands for 0
    halves: tuple[int, ...] = (0,)  # where a block has float16 numbers, its scale and offset, in bytes from its start
    group: int = 32  # columns that share a scale
    offsets: bool = False  # whether a group also has an offset
    codebook: int = 0  # number of the table (CODEBOOKS) of which the numbers are places; 0: none

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[self.name]

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return self.low.bits + (self.high.bits if self.high else 0)

    @property
    def columns(self) -> int:
        """The columns of a block. Of 256 the scale is a multiple of the block's, which is stored once."""
        return int(gguf.GGML_QUANT_SIZES[self.kind][0])

    @property
    def nbytes(self) -> int:
        """The bytes of a block."""
        return int(gguf.GGML_QUANT_SIZES[self.kind][1])


CODEBOOKS = {1: gguf.quants.IQ4_NL.kvalues, 2: gguf.quants.MXFP4.kvalues}
FORMATS = {
    row.name: row
    for row in (
        BlockFormat("Q4_0", BitField(2, 16, 4), zero=8),
        BlockFormat("Q4_1", BitField(4, 16, 4), halves=(0, 2), offsets=True),
        BlockFormat("Q5_0", BitField(6, 16, 4), BitField(2, 1, 1), zero=16),
        BlockFormat("Q5_1", BitField(8, 16, 4), BitField(4, 1, 1), halves=(0, 2), offsets=True),
        BlockFormat("Q8_0", BitField(2, 32, 8)),  # whose numbers are signed
        BlockFormat("IQ4_NL", BitField(2, 16, 4), codebook=1),
        BlockFormat("MXFP4", BitField(1, 16, 4), halves=(), codebook=2),  # whose scales are powers of 2, a byte each
        BlockFormat("Q2_K", BitField(16, 32, 2), halves=(80, 82), group=16, offsets=True),
        BlockFormat("Q3_K", BitField(32, 32, 2), BitField(0, 32, 1), zero=4, halves=(108,), group=16),
        BlockFormat("Q4_K", BitField(16, 32, 4), halves=(0, 2), offsets=True),
        BlockFormat("Q5_K", BitField(48, 32, 4), BitField(16, 32, 1), halves=(0, 2), offsets=True),
        BlockFormat("Q6_K", BitField(0, 64, 4), BitField(128, 32, 2), zero=32, halves=(208,), group=16),
        BlockFormat("IQ4_XS", BitField(8, 16, 4), codebook=1),
    )
}


@dataclass(frozen=True, eq=False, slots=True)
class BlockTensor:
    """A weight [out, in] in a block format."""

    blocks: Tensor  # uint8 [out, bytes of a row]
    format: BlockFormat

    def __post_init__(self) -> None:
        """Raise ValueError unless the format is one of FORMATS and the rows are whole blocks: kernels rely on it."""
        if FORMATS.get(self.format.name) != self.format:
            raise ValueError(f"there is no block format {self.format}; there are {', '.join(FORMATS)}")
        sizes = self.blocks.shape
        whole = len(sizes) == 2 and min(sizes) > 0 and sizes[1] % self.format.nbytes == 0
        if not whole or self.blocks.dtype != torch.uint8 or self.blocks.stride(1) != 1:
            raise ValueError(
                f"blocks of {self.format.name}, of {self.format.nbytes} bytes each, do not fit a tensor of "
                f"{self.blocks.dtype} {[*sizes]}"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, (out, in)."""
        return torch.Size((len(self.blocks), self.blocks.shape[1] // self.format.nbytes * self.format.columns))

    @property
    def bits(self) -> int:
        """The bits of a number, without those of scales."""
        return self.format.bits

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def halves(self) -> Tensor:
        """Return a copy of the numbers of float16 of all blocks, [blocks, numbers of a block]."""
        blocks = self.blocks.unflatten(1, (-1, self.format.nbytes)).flatten(0, 1)
        found = [blocks[:, place : place + 2].contiguous().view(torch.float16) for place in self.format.halves]
        return torch.cat(found, 1) if found else torch.empty(len(blocks), 0, dtype=torch.float16)

    def to(self, device: torch.device) -> BlockTensor:
        """Return the same weight on a device."""
        return self._map(lambda blocks: blocks.to(device))

    def rows(self, which: slice | Tensor) -> BlockTensor:
        """Return some rows as a weight of its own: a view of them for a slice, a copy for indices [n] int64."""
        if isinstance(which, slice):
            return self._map(lambda blocks: blocks[which])
        return self._map(lambda blocks: blocks.index_select(0, which))

    def _map(self, change: Callable[[Tensor], Tensor]) -> BlockTensor:
        return BlockTensor(change(self.blocks), self.format)
