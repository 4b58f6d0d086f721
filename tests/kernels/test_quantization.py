"""The format of quantized weights compared with MLX's and GGUF's, in numpy, and the guarantees of rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from kernels.weights.quantization import (
    QuantizedTensor,
    concatenate_quantized,
    dequantize,
    from_symmetric,
    quantize_symmetric,
    quantize_weight,
)
from tests.models.mlx_files import mlx_dequantized, mlx_quantized
from tests.models.rounded_weights import symmetric_rounded

formats = pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (4, 32), (4, 128), (8, 256), (4, 256)])


@formats
def test_numbers_are_those_of_mlx(bits: int, group: int) -> None:
    w = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    w[1] += 3  # no 0 within
    w[2] -= 3
    packed, scales, biases = mlx_quantized(w, bits, group)
    got = quantize_weight(torch.from_numpy(w), bits, group)
    assert got.numbers.numpy().tobytes() == packed.tobytes()
    np.testing.assert_allclose(got.scale.numpy(), scales, rtol=1e-6)
    np.testing.assert_allclose(got.offset.numpy(), biases, rtol=1e-6)
    values = mlx_dequantized(packed, scales, biases, bits, group)
    np.testing.assert_allclose(dequantize(got).numpy(), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32), (4, 128), (8, 32)])
def test_symmetric_numbers_are_those_of_the_formula(bits: int, group: int | None) -> None:
    w = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    w[1] += 3  # no 0 within
    w[2] -= 3
    w[3, :64] = 0
    got = quantize_symmetric(torch.from_numpy(w), bits, group)
    np.testing.assert_allclose(dequantize(got).numpy(), symmetric_rounded(w, bits, group), rtol=0, atol=1e-6)
    assert torch.equal(got.offset, got.scale * -(2 ** (bits - 1)))
    assert got.group == (group or 256)


def test_four_bits_are_those_of_gguf() -> None:
    """GGUF's Q4_0 rounds halves up and has float16 scales; the numbers here avoid both differences."""
    w = np.random.default_rng(0).integers(-8, 8, (7, 128)).astype(np.float32) / 4
    w[:, ::32] = -2.0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w, Type.Q4_0), Type.Q4_0)
    assert np.array_equal(dequantize(quantize_symmetric(torch.from_numpy(w), 4, 32)).numpy(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_a_symmetric_weight_is_within_a_step(bits: int, group: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 1024).to(dtype)
    got = quantize_symmetric(weight, bits, group)
    largest = weight.double().abs().unflatten(-1, (-1, group or 1024)).amax(-1)
    off = (dequantize(got).double() - weight.double()).abs().unflatten(-1, (-1, group or 1024))
    step = largest / 2 ** (bits - 1)
    assert off.mean() < 0.3 * step.mean(), "half a step at most, and a quarter on average, but for the far edge"
    assert (off.amax(-1) <= 1.05 * step).all()
    assert got.scale.dtype is (dtype if group else torch.float32)


def test_rows_of_any_width_are_groups_of_8_bits() -> None:
    w = np.random.default_rng(0).standard_normal((3, 37)).astype(np.float32)
    got = quantize_symmetric(torch.from_numpy(w), 8)
    np.testing.assert_allclose(dequantize(got).numpy(), symmetric_rounded(w, 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("largest", "bits", "kept"), [(500.0, 8, 16), (600.0, 8, 32), (8000.0, 4, 16), (9000.0, 4, 32)]
)
def test_offsets_beyond_float16_take_float32(largest: float, bits: int, kept: int) -> None:
    scale = torch.tensor([[-largest], [0.01]]).half()
    weight = from_symmetric(torch.arange(64 * bits // 8, dtype=torch.uint8).repeat(2, 1), scale, bits)
    assert weight.scale.dtype is weight.offset.dtype is (torch.float16 if kept == 16 else torch.float32)
    assert torch.equal(weight.scale.float(), scale.float())
    assert torch.equal(weight.offset.float(), -(2 ** (bits - 1)) * scale.float())


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_comes_back_is_within_a_step(bits: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 1024).to(dtype)
    grouped = weight.double().unflatten(-1, (-1, group))
    step = (grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)
    got = quantize_weight(weight, bits, group)
    off = (dequantize(got).double() - weight.double()).abs().unflatten(-1, (-1, group))
    assert got.scale.dtype is dtype
    assert off.mean() < 0.3 * step.mean(), "half a step at most, and a quarter on average, but for the far edge"
    assert (off.amax(-1) <= 1.5 * step).all()


def test_size() -> None:
    weight = torch.randn(30, 256).bfloat16()
    assert [quantize_weight(weight, bits, 32).nbytes for bits in (8, 4)] == [
        30 * (256 * bits // 8 + 256 // 32 * 2 * 2) for bits in (8, 4)
    ]
    assert quantize_weight(weight, 4, 32).shape == weight.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [0.0, 1.0, -0.37, 1e-6, 3e4])
def test_numbers_all_the_same_are_exact(number: float, dtype: torch.dtype) -> None:
    weight = torch.full((3, 64), number).to(dtype)
    for bits in (4, 8):
        assert torch.equal(dequantize(quantize_weight(weight, bits, 32)), weight.float())
    assert torch.equal(dequantize(quantize_symmetric(weight, 8)), weight.float())


def test_a_zero_among_others_stays_one() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 64)
    weight[:, ::7] = 0
    for bits in (4, 8):
        assert dequantize(quantize_weight(weight, bits, 32))[:, ::7].abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1e-40, 1e-7, 6e4, 3e38])
def test_numbers_at_the_end_of_a_dtype_stay_finite(largest: float, dtype: torch.dtype) -> None:
    weight = torch.linspace(-1, 1, 64).mul(min(largest, torch.finfo(dtype).max)).to(dtype)[None]
    for bits in (4, 8):
        off = (dequantize(quantize_weight(weight, bits, 32)).double() - weight.double()).abs().max()
        assert off <= max(float(weight.double().abs().max()) / 7, 3e-7), "float16 has no scale finer than that"


def test_rows_are_quantized_alike_however_many_there_are() -> None:
    weight = torch.randn(9000, 256)  # several tiles
    for quantize in (quantize_weight, quantize_symmetric):
        whole, part = quantize(weight, 4, 64), quantize(weight[8500:8501], 4, 64)
        for name in ("numbers", "scale", "offset"):
            assert torch.equal(getattr(whole.rows(slice(8500, 8501)), name), getattr(part, name))
        assert torch.equal(dequantize(whole.rows(torch.tensor([8500, 0])))[0], dequantize(part)[0])


def test_joined_weights_of_several_formats_keep_their_values() -> None:
    parts = [quantize_weight(torch.randn(n, 256), bits, group) for n, bits, group in ((5, 4, 64), (3, 8, 128))]
    both = concatenate_quantized(parts)
    assert (both.bits, both.group, both.shape) == (8, 64, (8, 256))
    assert torch.equal(dequantize(both), torch.cat([dequantize(part) for part in parts]))
    same = concatenate_quantized(parts[:1] * 2)
    assert (same.bits, same.group, same.nbytes) == (4, 64, 2 * parts[0].nbytes)


@pytest.mark.parametrize(
    ("weight", "bits", "group", "message"),
    [
        (torch.ones(2, 64), 6, 32, "weights of 6 bits are not supported; 4 and 8 bits are"),
        (torch.ones(2, 80), 4, 32, "groups of 32 do not divide rows of 80 columns"),
        (torch.ones(2, 63), 4, 63, "groups of 63 do not divide rows of 63 columns"),
        (torch.full((2, 64), torch.nan), 4, 32, "NaN or infinite"),
        (torch.full((2, 64), -torch.inf), 8, 32, "NaN or infinite"),
    ],
)
def test_what_cannot_be_quantized_is_told(weight: Tensor, bits: int, group: int, message: str) -> None:
    for quantize in (quantize_weight, quantize_symmetric):
        with pytest.raises(ValueError, match=message):
            quantize(weight, bits, group)


def test_numbers_and_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        QuantizedTensor(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1), 4, 64)
