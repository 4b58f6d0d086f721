"""Weights and activations after rounding to integers, by numpy and by formula: a reference for quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kernels.ops import Weight
from kernels.reference.backend import ReferenceOps
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor
from kernels.weights.stored import dequantize_weight
from server.models.weights import WeightFormat

SHORT_TEXTS = torch.arange(2, 50).view(
    6, 8
)  # in a long one, what is rounded otherwise once is seen by all that follows
Array = np.ndarray[Any, np.dtype[np.float32]]


def symmetric_rounded(w: Array, bits: int, group: int | None = None) -> Array:
    """[out, in] as --weights int8 and int4 leave it: the number farthest from 0 in a group of columns is the lowest."""
    zero = np.float32(2 ** (bits - 1))
    grouped = w.reshape(len(w), -1, group or w.shape[1])
    farthest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1, keepdims=True), -1)
    scale = np.where(farthest == 0, np.float32(1), farthest / -zero)
    return (np.clip(np.rint(grouped / scale), -zero, zero - 1) * scale).reshape(w.shape)


def round_weights(model: PreTrainedModel, format: WeightFormat) -> PreTrainedModel:
    """Return the model with its matrices rounded, except for routers and an untied embedding."""
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2 or name.endswith("gate.weight") or ("embed" in name and not tied):
                continue
            for matrix in p if p.dim() == 3 else (p,):  # experts
                divided = format.group_size is None or matrix.shape[1] % format.group_size == 0
                how = format if divided else (8, None)
                matrix.copy_(torch.from_numpy(symmetric_rounded(matrix.numpy(), *how)))
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
