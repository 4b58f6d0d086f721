"""Weights that are quantized to block formats: the judge of values is gguf, and rounding to nearest must be beaten."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.weights.block_formats import FORMATS
from kernels.weights.quantizers import QUANTIZERS, quantize_blocks

LEVELS = {"Q4_K": 15, "Q5_0": 31, "Q6_K": 63, "Q8_0": 255}

every_format = pytest.mark.parametrize("name", QUANTIZERS)


def dequantized(weight: Tensor, name: str) -> Tensor:
    """Return the values of a weight after it was quantized, in float64."""
    found = quantize_blocks(weight, name)
    return torch.from_numpy(gguf.quants.dequantize(found.blocks.numpy(), FORMATS[name].kind)).double()


def draw(out: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers with the heavy tails that weights have."""
    return (torch.randn(out, width) * torch.randn(out, width).abs().sqrt() * 0.02).to(dtype)


def rounded_to_nearest(weight: Tensor, name: str) -> Tensor:
    """Return the values of the numbers that are nearest between the least and the largest of a group."""
    grouped = weight.double().unflatten(1, (-1, FORMATS[name].group))
    if FORMATS[name].offsets:
        low = grouped.amin(-1, keepdim=True).clamp(max=0)
        step = (grouped.amax(-1, keepdim=True) - low) / LEVELS[name]
        return (((grouped - low) / step).round() * step + low).flatten(1)
    step = grouped.abs().amax(-1, keepdim=True) / (LEVELS[name] // 2)
    return ((grouped / step).round() * step).flatten(1)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_less_than_that_of_rounding_to_nearest(name: str, dtype: torch.dtype) -> None:
    weight = draw(40, 512, dtype)
    error, nearest = (
        (values - weight.double()).square().mean()
        for values in (dequantized(weight, name), rounded_to_nearest(weight, name))
    )
    # With 8 bits, and with scales that are themselves rounded to 8 bits, there is little to gain.
    assert error < nearest * {"Q4_K": 0.9, "Q5_0": 0.9, "Q6_K": 1.0, "Q8_0": 1.05}[name]


def test_8_bits_are_those_of_gguf() -> None:
    weight = draw(30, 256)
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.mean(quantize_blocks(weight, "Q8_0").blocks.numpy() != theirs) < 1e-3, "halves may round otherwise"


@every_format
@pytest.mark.parametrize("number", [0.0, 1.0, -0.375, 2.0**-5])
def test_numbers_all_the_same_are_nearly_exact(name: str, number: float) -> None:
    values = dequantized(torch.full((3, 512), number), name)
    assert (values - number).abs().max() <= abs(number) * 4e-3 + 127 * 3e-8, "float16: 11 bits, multiples of 6e-8"


@every_format
@pytest.mark.parametrize("largest", [1e-40, 1e-9, 1e-6, 6e4])
def test_numbers_of_any_size_stay_finite(name: str, largest: float) -> None:
    weight = torch.linspace(-1, 1, 512).mul(largest)[None]
    off = (dequantized(weight, name) - weight.double()).abs().max()
    assert off <= max(largest / 7, 1e-6), "float16 has no number finer than 6e-8"


@every_format
def test_one_large_number_among_zeros(name: str) -> None:
    weight = torch.zeros(2, 512)
    weight[0, 300], weight[1, 17] = 5.0, -5.0
    assert (dequantized(weight, name) - weight.double()).abs().max() < 0.02


@every_format
def test_rows_are_quantized_alike_however_many_there_are(name: str) -> None:
    weight = draw(3000, 256)  # several tiles
    whole, part = quantize_blocks(weight, name), quantize_blocks(weight[2500:2501], name)
    assert torch.equal(whole.blocks[2500:2501], part.blocks)


@every_format
def test_what_cannot_be_quantized_is_told(name: str) -> None:
    for wrong in (torch.nan, torch.inf, -torch.inf, 1e5):
        weight = draw(3, 512)
        weight[1, 77] = wrong
        with pytest.raises(ValueError, match="NaN, infinite or beyond float16"):
            quantize_blocks(weight, name)
    with pytest.raises(ValueError, match=f"rows of 80 columns are not whole blocks of {name}"):
        quantize_blocks(torch.ones(2, 80), name)
    with pytest.raises(ValueError, match=r"weights are quantized to Q4_K, .*, not to Q2_K"):
        quantize_blocks(torch.ones(2, 256), "Q2_K")
