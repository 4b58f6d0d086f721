"""Products of activations and weights in plain torch that are right on every device. Knows no other operation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

# Maximum number of products that are summed at once: torch 2.13 gets longer sums wrong on M1 and M2 (pytorch#193487,
# pytorch#195163).
MAX_SUMMED = 32_766


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return torch's `linear`; on an accelerator, long sums are computed in parts of at most MAX_SUMMED products."""
    if x.device.type == "cpu" or x.shape[-1] <= MAX_SUMMED:
        return F.linear(x, weight, bias)
    parts = zip(x.split(MAX_SUMMED, -1), weight.split(MAX_SUMMED, 1), strict=True)
    out = F.linear(*next(parts), bias)
    for part in parts:
        out += F.linear(*part)
    return out
