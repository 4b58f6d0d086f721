"""Weights as checkpoints store them (`StoredWeight`), and several weights that are used as one.

Floats are torch's tensors; quantization.py has integers with scales and offsets, block_formats.py the blocks of GGUF
files. Knows neither files nor products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from kernels.memory import concatenate
from kernels.weights.block_formats import BlockTensor
from kernels.weights.block_packing import dequantize_blocks
from kernels.weights.quantization import QuantizedTensor, concatenate_quantized, dequantize

QuantizedWeight = QuantizedTensor | BlockTensor  # [out, in]
StoredWeight = Tensor | QuantizedWeight


def get_format(weight: StoredWeight) -> str:
    """Return the name of a weight's format, such as "bfloat16", "int4" or "Q4_K"."""
    match weight:
        case Tensor():
            return str(weight.dtype).removeprefix("torch.")
        case QuantizedTensor():
            return f"int{weight.bits}"
        case BlockTensor():
            return weight.format.name


def dequantize_weight(weight: StoredWeight) -> Tensor:
    """Return the values of a weight [out, in]: float32, or the weight itself if it is of floats."""
    match weight:
        case Tensor():
            return weight
        case QuantizedTensor():
            return dequantize(weight)
        case BlockTensor():
            return dequantize_blocks(weight)


class ConcatenatedWeight:
    """Several weights [n, in] that are used as one, concatenated along the first dimension."""

    def __init__(self, parts: Sequence[StoredWeight]) -> None:
        """Keep the weights. Raises ValueError if they differ in width, or if floats are among others."""
        shapes = [part.shape for part in parts]
        widths = {shape[-1] for shape in shapes}
        dtypes = {part.dtype if isinstance(part, Tensor) else None for part in parts}
        if len(widths) != 1 or len(dtypes) != 1 or any(len(shape) != 2 for shape in shapes):
            found = ", ".join(f"{get_format(part)} {[*part.shape]}" for part in parts)
            raise ValueError(
                f"only matrices of one width, and of one dtype or all quantized, can be joined, not {found}"
            )
        self.parts = parts
        self.shape = torch.Size((sum(shape[0] for shape in shapes), shapes[0][1]))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def group_by_format(self) -> list[list[StoredWeight]]:
        """Return the weights in groups of neighbours that have the same format."""
        return [[*parts] for _, parts in groupby(self.parts, _get_kind)]

    def merge(self) -> StoredWeight | ConcatenatedWeight:
        """Return the weight with neighbours of the same format concatenated, which copies them."""
        merged = [concatenate_alike(parts) for parts in self.group_by_format()]
        return merged[0] if len(merged) == 1 else ConcatenatedWeight(merged)


def _get_kind(weight: StoredWeight) -> tuple[object, ...]:
    """Return what weights have in common whose bytes can be concatenated."""
    match weight:
        case Tensor():
            return (weight.dtype,)
        case QuantizedTensor():
            return weight.bits, weight.group, weight.scale.dtype
        case BlockTensor():
            return (weight.format,)


def concatenate_alike(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Concatenate weights that have the same format."""
    match parts[0]:
        case _ if len(parts) == 1:
            return parts[0]
        case Tensor():
            return concatenate(cast(Sequence[Tensor], parts))
        case QuantizedTensor():
            return concatenate_quantized(cast(Sequence[QuantizedTensor], parts))
        case BlockTensor() as first:
            return BlockTensor(concatenate([part.blocks for part in cast(Sequence[BlockTensor], parts)]), first.format)
