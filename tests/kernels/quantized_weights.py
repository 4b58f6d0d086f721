"""Quantized weights for tests, by MLX's rounding written out in numpy."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.weights.quantization import QuantizedTensor
from tests.models.mlx_files import mlx_quantized


def quantize_as_mlx(weight: Tensor, bits: int, group: int) -> QuantizedTensor:
    """Quantize a weight [out, in] of floats to numbers with scales and offsets of its dtype."""
    packed, *scales = mlx_quantized(weight.float().numpy(), bits, group)
    scale, offset = (torch.from_numpy(each).to(weight.dtype) for each in scales)
    return QuantizedTensor(torch.from_numpy(packed).view(torch.uint8), scale, offset, bits, group)
