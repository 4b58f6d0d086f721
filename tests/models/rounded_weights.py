"""Weights and activations after rounding to integers, by numpy and by formula: a reference for quantization."""

from __future__ import annotations

import gguf
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kernels.ops import Weight
from kernels.reference.backend import ReferenceOps
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor
from kernels.weights.quantizers import quantize_blocks
from kernels.weights.stored import dequantize_weight
from server.models.formats.quantized import choose_block_format
from server.models.weights import WeightFormat

# Of two tokens: what is rounded otherwise once, as about two numbers of 48 tokens are, is seen by all that follows
SHORT_TEXTS = torch.arange(2, 50).view(24, 2)


def round_weights(model: PreTrainedModel, format: WeightFormat) -> PreTrainedModel:
    """Return the model with its matrices rounded as they are quantized at load, by `gguf.quants.dequantize`.

    Routers stay what they are. Tied weights are rounded once.
    """
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2 or name.endswith("gate.weight"):
                continue
            own = name.replace("experts.down_proj", "experts.0.w2.weight")  # of all experts, in one tensor
            for matrix in p if p.dim() == 3 else (p,):  # experts
                if chosen := choose_block_format(format, own, matrix.shape[1], layers):
                    blocks = quantize_blocks(matrix, chosen).blocks
                    matrix.copy_(torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), FORMATS[chosen].kind)))
    return model


class RoundedInputs(ReferenceOps):
    """Rounds 32 columns of x to 127 whole numbers of either sign, where the C++ kernels do; multiplies in float64."""

    block_formats = FORMATS

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, QuantizedTensor | BlockTensor):
            return super().linear(x, weight, bias)
        width = x.shape[1]
        units = F.pad(x.double(), (0, -width % 32)).unflatten(-1, (-1, 32))
        step = units.abs().amax(-1, keepdim=True).clamp_min(1e-300) / 127
        y = ((units / step).round() * step).flatten(1)[:, :width] @ dequantize_weight(weight).double().T
        return (y if bias is None else y + bias.double()).to(x.dtype)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """How far logits [n, V] of most tokens are, as a share of their spread.

    Not of all: an activation between two whole numbers becomes either, as its last bit is.
    """
    return float((a - b).abs().mean(-1).median() / b.std())
