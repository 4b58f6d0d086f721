"""Weights of integers with scales and offsets, compared with MLX's in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.weights.quantization import QuantizedTensor, concatenate_quantized, dequantize
from tests.kernels.quantized_weights import quantize_as_mlx
from tests.models.mlx_files import mlx_dequantized, mlx_quantized


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (4, 32), (4, 128), (8, 256), (4, 256)])
def test_values_are_those_of_mlx(bits: int, group: int) -> None:
    w = np.random.default_rng().standard_normal((5, 256)).astype(np.float32)
    packed, scales, biases = mlx_quantized(w, bits, group)
    got = quantize_as_mlx(torch.from_numpy(w), bits, group)
    assert got.shape == (5, 256)
    values = mlx_dequantized(packed, scales.astype(np.float32), biases.astype(np.float32), bits, group)
    np.testing.assert_allclose(dequantize(got).numpy(), values, rtol=0, atol=1e-5)
    assert torch.equal(dequantize(got.rows(torch.tensor([4, 0]))), dequantize(got)[[4, 0]])


def test_joined_weights_of_several_formats_keep_their_values() -> None:
    parts = [quantize_as_mlx(torch.randn(n, 256), bits, group) for n, bits, group in ((5, 4, 64), (3, 8, 128))]
    both = concatenate_quantized(parts)
    assert (both.bits, both.group, both.shape) == (8, 64, (8, 256))
    assert torch.equal(dequantize(both), torch.cat([dequantize(part) for part in parts]))
    same = concatenate_quantized(parts[:1] * 2)
    assert (same.bits, same.group, same.nbytes) == (4, 64, 2 * parts[0].nbytes)


def test_numbers_and_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        QuantizedTensor(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1), 4, 64)
