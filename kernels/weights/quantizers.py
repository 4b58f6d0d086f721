"""Quantizes weights of floats to the block formats of GGUF files, each group with the scale of the least error.

Rounding to the nearest step between the smallest and the largest number is far from the best: a few large numbers make
the steps of all others too wide. So several steps are tried for each group. For the integers that a step leads to, the
best scale and offset have a closed form (least squares), as in llama.cpp's `make_qkx2_quants` and `make_qx_quants`.
Errors are weighted by the size of numbers, which follow from no data but serve predictions better than equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernels.memory import concatenate
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.block_packing import pack_multiples_of_q4_k, pack_numbers
from kernels.weights.quantization import count_tile_rows

# By how many steps the range of a group is stretched over the numbers, to find the scale of the least error
STRETCHES = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5)
TINY = 1e-30  # in place of a divisor of 0


def quantize_blocks(weight: Tensor, name: str) -> BlockTensor:
    """Quantize a weight [out, in] of floats to a format of QUANTIZERS.

    Raises ValueError for another format, for rows that are not whole blocks, and for numbers that are NaN or infinite
    or beyond float16.
    """
    if name not in QUANTIZERS:
        raise ValueError(f"weights are quantized to {', '.join(QUANTIZERS)}, not to {name}")
    format, width = FORMATS[name], weight.shape[1]
    if width % format.columns:
        raise ValueError(f"rows of {width} columns are not whole blocks of {name}, of {format.columns} columns each")
    parts = []
    for rows in weight.split(count_tile_rows(width)):
        wide = rows.float()
        if not wide.abs().amax() <= torch.finfo(torch.float16).max:
            raise ValueError(
                "the weight has numbers that are NaN, infinite or beyond float16, which cannot be quantized"
            )
        parts.append(QUANTIZERS[name](wide.reshape(-1, format.columns)).view(len(rows), -1))
    return BlockTensor(concatenate(parts), format)


# -------------------------------------------------------------------- formats: float32 [n, columns] -> uint8 [n, bytes]
def _quantize_q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    numbers = (x / scale.where(scale > 0, 1)).round_().to(torch.int8)
    return torch.cat((_as_bytes(scale.half()), numbers.view(torch.uint8)), 1)


def _quantize_q5_0(x: Tensor) -> Tensor:
    scale = _search_scale(x[:, None], 16)[:, 0].half()  # [n, 1]
    return torch.cat((_as_bytes(scale), pack_numbers(_round_symmetric(x, scale.float(), 16), FORMATS["Q5_0"])), 1)


def _quantize_q6_k(x: Tensor) -> Tensor:
    grouped = x.unflatten(1, (16, 16))
    wanted = _search_scale(grouped, 32)[..., 0]  # [n, 16]
    peak = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))
    scale = (peak / -128).half()  # the largest in size becomes -128
    multiples = _divide(wanted, scale.float()).round_().clamp_(-128, 127)
    numbers = _round_symmetric(grouped, (multiples * scale.float())[..., None], 32).flatten(1)
    packed = pack_numbers(numbers, FORMATS["Q6_K"])
    return torch.cat((packed, multiples.to(torch.int8).view(torch.uint8), _as_bytes(scale)), 1)


def _quantize_q4_k(x: Tensor) -> Tensor:
    grouped = x.unflatten(1, (8, 32))
    wanted = _search_scale_and_offset(grouped, 15)  # value = scale * number - offset
    halves = [(each.amax(1, keepdim=True) / 63).half() for each in wanted]  # [n, 1, 1]
    multiples, numbers = _round_multiples(grouped, wanted, [each.float() for each in halves])
    packed = pack_multiples_of_q4_k(*(each[..., 0].to(torch.uint8) for each in multiples))
    packed_numbers = pack_numbers(numbers.flatten(1), FORMATS["Q4_K"])
    return torch.cat((*(_as_bytes(each[..., 0]) for each in halves), packed, packed_numbers), 1)


def _round_multiples(x: Tensor, wanted: Sequence[Tensor], units: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    """Round scales and offsets to multiples of the block's units, from 0 to 63: of the nine nearest pairs the best.

    x is [n, 8, 32]. Returns the multiples, float32 [n, 8, 1] each, and the numbers, uint8 [n, 8, 32].
    """
    weights = _weigh(x)
    nearest = [_divide(each, unit).round_() for each, unit in zip(wanted, units, strict=True)]
    least, best = torch.full_like(nearest[0], torch.inf), nearest
    for steps in product((-1, 0, 1), repeat=2):
        tried = [(each + step).clamp_(0, 63) for each, step in zip(nearest, steps, strict=True)]
        scale, offset = (each * unit for each, unit in zip(tried, units, strict=True))
        off = _round_affine(x, scale, offset).mul_(scale).sub_(offset).sub_(x)
        error = (weights * off.square_()).sum(-1, keepdim=True)
        better = error < least
        least, best = least.where(~better, error), [a.where(~better, b) for a, b in zip(best, tried, strict=True)]
    scale, offset = (each * unit for each, unit in zip(best, units, strict=True))
    return best, _round_affine(x, scale, offset).to(torch.uint8)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_K": _quantize_q4_k,
    "Q5_0": _quantize_q5_0,
    "Q6_K": _quantize_q6_k,
    "Q8_0": _quantize_q8_0,
}


# -------------------------------------------------------------------- searches, for groups [n, groups, columns]
def _weigh(x: Tensor) -> Tensor:
    """Return the weights of the numbers' errors."""
    return x.abs() + x.square().mean(-1, keepdim=True).sqrt_()


def _search_scale(x: Tensor, half: int) -> Tensor:
    """Return the scales [n, groups, 1] for numbers from -half to half - 1 with the least weighted error."""
    weights = x.square()
    peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best, most = torch.zeros_like(peak), torch.zeros_like(peak)
    for stretch in STRETCHES:
        numbers = (x * _divide(torch.full_like(peak, -half - stretch), peak)).round_().clamp_(-half, half - 1)
        weighted = weights * numbers
        along, square = ((weighted * each).sum(-1, keepdim=True) for each in (x, numbers))
        gain = _divide(along * along, square)  # by so much the error is less than with a scale of 0
        better = gain > most
        most, best = most.where(~better, gain), best.where(~better, _divide(along, square))
    return best


def _search_scale_and_offset(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return (scales, offsets) [n, groups, 1] of value = scale * number - offset with the least weighted error.

    Numbers are from 0 to `levels`; neither a scale nor an offset is negative.
    """
    weights = _weigh(x)
    low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True)
    fit = partial(_fit, weights, weights * x, weights.sum(-1, keepdim=True), (weights * x).sum(-1, keepdim=True))
    best_scale, best_offset, least = (high - low) / levels, -low, torch.full_like(low, torch.inf)
    for stretch in STRETCHES:
        numbers = ((x - low) * _divide(torch.full_like(low, levels + stretch), high - low)).round_().clamp_(0, levels)
        scale, offset, error = fit(numbers)
        better = error < least
        least = least.where(~better, error)
        best_scale, best_offset = best_scale.where(~better, scale), best_offset.where(~better, offset)
    return best_scale, best_offset


def _fit(weights: Tensor, weighted_x: Tensor, total: Tensor, mass: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
    """Return the best scale and offset for numbers, and the weighted error, up to a constant of the group."""
    weighted = weights * numbers
    first, second = weighted.sum(-1, keepdim=True), (weighted * numbers).sum(-1, keepdim=True)
    along = (weighted_x * numbers).sum(-1, keepdim=True)
    determinant = total * second - first * first
    scale = _divide(total * along - mass * first, determinant)
    offset = _divide(first * along - second * mass, determinant)
    negative = offset < 0
    scale, offset = scale.where(~negative, _divide(along, second)), offset.clamp(min=0)
    error = scale * (scale * second - 2 * along) + offset * (offset * total + 2 * mass - 2 * scale * first)
    return scale, offset, error.where(scale > 0, torch.inf)


def _round_affine(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 for value = scale * number - offset, as floats."""
    return _divide(x + offset, scale).round_().clamp_(0, 15)


def _round_symmetric(x: Tensor, scale: Tensor, half: int) -> Tensor:
    """Return x / scale as uint8, with `half` for 0."""
    return _divide(x, scale).round_().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8)


def _divide(x: Tensor, by: Tensor) -> Tensor:
    """Return x / by, and 0 where `by` is 0; the divisors are fewer than what they divide."""
    return x * torch.where(by.abs() > TINY, 1 / by, 0.0)


def _as_bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8)
