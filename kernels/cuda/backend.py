"""The backend for NVIDIA GPUs: the Metal kernels, except for products that torch computes."""

from __future__ import annotations

from torch import Tensor

from kernels.metal.backend import MetalOps
from kernels.ops import Weight
from kernels.reference.backend import ReferenceOps


class CudaOps(MetalOps):
    """The Metal operations on an NVIDIA GPU; torch multiplies by weights that are not quantized, with cuBLAS."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return ReferenceOps.linear(self, x, weight, bias)
        return super().linear(x, weight, bias)
