"""Unpacks the blocks of GGUF files to numbers, scales and offsets, and packs those that quantization needs.

The arithmetic is that of `gguf.quants.dequantize`, in its order, so the values have the same bits; but torch computes
them on the weight's device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weights.block_formats import CODEBOOKS, BitField, BlockFormat, BlockTensor


class Unpacked(NamedTuple):
    """A weight in a block format: value = scale * number + offset, in float32."""

    numbers: Tensor  # int8 or uint8 [blocks, groups, columns of a group]
    scale: Tensor  # float32 [blocks, groups]
    offset: Tensor | None  # the same; None: 0


def dequantize_blocks(weight: BlockTensor) -> Tensor:
    """Return the values of a weight, as float32 [out, in]."""
    numbers, scale, offset = unpack_blocks(weight)
    values = numbers.float().mul_(scale[..., None])
    if offset is not None:
        values.add_(offset[..., None])
    return values.view(weight.shape)


def unpack_blocks(weight: BlockTensor) -> Unpacked:
    """Return the numbers, scales and offsets of a weight; the blocks are in the order of its rows."""
    format = weight.format
    blocks = weight.blocks.unflatten(1, (-1, format.nbytes)).flatten(0, 1)
    numbers = _unpack_bits(blocks, format.low, format.columns)
    if format.high is not None:
        numbers |= _unpack_bits(blocks, format.high, format.columns) << format.low.bits
    if format.codebook:
        book = torch.tensor(CODEBOOKS[format.codebook], dtype=torch.int8, device=blocks.device)
        numbers = book[numbers.int()]
    elif format.zero or format.bits == 8:
        numbers = numbers.view(torch.int8) - format.zero
    scale, offset = _unpack_scales(weight, blocks)
    return Unpacked(numbers.unflatten(1, (-1, format.group)), scale, offset)


def _unpack_bits(blocks: Tensor, field: BitField, columns: int) -> Tensor:
    """Return a field of blocks [n, bytes] as uint8 [n, columns]."""
    count = columns * field.bits // 8
    stored = blocks[:, field.start : field.start + count].reshape(len(blocks), -1, 1, field.run)
    shifts = torch.arange(0, 8, field.bits, dtype=torch.uint8, device=blocks.device)[:, None]
    return (stored >> shifts).bitwise_and_((1 << field.bits) - 1).flatten(1)


def pack_numbers(numbers: Tensor, format: BlockFormat) -> Tensor:
    """Return the bytes of numbers, uint8 [n, columns]: their fields, in the order in which a block has them."""
    fields = [(format.low, numbers)]
    if format.high is not None:
        fields.append((format.high, numbers >> format.low.bits))
    return torch.cat([_pack_bits(bits, field) for field, bits in sorted(fields, key=lambda each: each[0].start)], 1)


def _pack_bits(numbers: Tensor, field: BitField) -> Tensor:
    """Return the bytes of a field, uint8 [n, bytes], that has `field.bits` bits of each number, uint8 [n, columns]."""
    shifts = torch.arange(0, 8, field.bits, dtype=torch.uint8, device=numbers.device)[:, None]
    parts = numbers.bitwise_and((1 << field.bits) - 1).reshape(len(numbers), -1, 8 // field.bits, field.run) << shifts
    return parts.sum(2, dtype=torch.uint8).flatten(1)


# -------------------------------------------------------------------- scales
def _unpack_scales(weight: BlockTensor, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scales and offsets of all groups, float32 [blocks, groups]; None: the format has no offsets."""
    format = weight.format
    if not format.halves:
        return _decode_exponents(blocks[:, :1]), None
    halves = weight.halves().float()
    scale, offset = halves[:, :1], halves[:, 1:] if format.offsets else None
    if format.name not in _MULTIPLES:
        return scale, offset
    scales, offsets = _MULTIPLES[format.name](blocks)
    if offset is None or offsets is None:
        return scale * scales.float(), None
    return scale * scales.float(), -(offset * offsets.float())


def _decode_exponents(exponents: Tensor) -> Tensor:
    """Return half of 2^(e - 127) for each uint8 e, as float32."""
    wide = exponents.int()
    return torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23).view(torch.float32)


def _multiples_of_q2_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return blocks[:, :16] & 15, blocks[:, :16] >> 4


def _multiples_of_q3_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    low, high = _unpack_bits(blocks, BitField(96, 8, 4), 16), _unpack_bits(blocks, BitField(104, 4, 2), 16)
    return (low | high << 4).view(torch.int8) - 32, None


def _multiples_of_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return 8 scales and 8 offsets of 6 bits: those of the later four groups have their high bits above the others."""
    scales, offsets, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return (
        torch.cat((scales & 63, both & 15 | scales >> 2 & 48), 1),
        torch.cat((offsets & 63, both >> 4 | offsets >> 2 & 48), 1),
    )


def pack_multiples_of_q4_k(scales: Tensor, offsets: Tensor) -> Tensor:
    """Return the 12 bytes of 8 scales and 8 offsets of 6 bits, uint8 [n, 8] each."""
    both = scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    first = [each[:, :4] | (each[:, 4:] & 48) << 2 for each in (scales, offsets)]
    return torch.cat((*first, both), 1)


def _multiples_of_q6_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return blocks[:, 192:208].contiguous().view(torch.int8), None


def _multiples_of_iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    low, high = _unpack_bits(blocks, BitField(4, 1, 4), 8), _unpack_bits(blocks, BitField(2, 1, 2), 8)
    return (low | high << 4).view(torch.int8) - 32, None


_MULTIPLES = {  # formats of 256 columns -> the integers by which the scale and offset of a block are multiplied
    "Q2_K": _multiples_of_q2_k,
    "Q3_K": _multiples_of_q3_k,
    "Q4_K": _multiples_of_q4_k,
    "Q5_K": _multiples_of_q4_k,
    "Q6_K": _multiples_of_q6_k,
    "IQ4_XS": _multiples_of_iq4_xs,
}
