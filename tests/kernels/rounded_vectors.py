"""Rounding and rotation of keys and values by numpy, from their definitions (kernels/kv_formats.py)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def round_to_int8(x: Tensor) -> Tensor:
    """Round vectors x [..., D] to int8; return what is read of them, float32."""
    wide = x.float().numpy()
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(wide / scale) * scale)


def hadamard_matrix(dim: int) -> NDArray[np.float64]:
    """Return the orthonormal matrix [dim, dim]: Sylvester's of the largest power of two, on the diagonal."""
    size = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return np.kron(np.eye(dim // size), matrix) / size**0.5
