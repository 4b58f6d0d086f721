"""knorm: keeps the keys with the smallest L2 norms.

Keys with small norms get high attention weights in most heads and layers of trained models, although their products
with queries could be expected to be small. Needs keys alone, and is the cheapest scorer of all that look at them.

After Devoto et al., "A simple and effective L2 norm-based strategy for KV cache compression" (EMNLP 2024,
arXiv:2406.11430).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer


class KNorm(Scorer):
    """Scores a key by its negative L2 norm."""

    def score(self, past: Past) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(past.stored_keys, dim=-1, dtype=torch.float32)
        return -norms
