"""Random weights in the block formats of GGUF files."""

from __future__ import annotations

import random

import numpy as np
import torch

from kernels.weights.block_formats import BlockFormat, BlockTensor
from kernels.weights.block_packing import dequantize_blocks


def draw_weight(
    rng: random.Random, format: BlockFormat, rows: int, blocks: int, spread: float | None = None
) -> BlockTensor:
    """Return random bytes as a weight, with finite scales; `spread` is the standard deviation of its values."""
    drawn = np.frombuffer(rng.randbytes(rows * blocks * format.nbytes), np.uint8).reshape(-1, format.nbytes).copy()
    scales = np.array([[rng.uniform(-1, 1) for _ in format.halves] for _ in drawn])
    if format.name == "MXFP4":  # whose scales are powers of 2
        drawn[:, 0] = drawn[:, 0] % 40 + 100 if spread is None else 122

    def make(factor: float) -> BlockTensor:
        for i, place in enumerate(format.halves):
            drawn[:, place : place + 2] = (scales[:, i : i + 1] * factor).astype(np.float16).view(np.uint8)
        return BlockTensor(torch.from_numpy(drawn.copy()).view(rows, -1), format)

    weight = make(1)
    return weight if spread is None else make(spread / float(dequantize_blocks(weight).std()))
