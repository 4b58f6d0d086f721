"""keydiff: keeps the keys that differ most from the mean of their head's keys.

Keys that point in other directions than most are those that attention can tell apart: they get high weights from some
queries, and keys near the mean resemble many others. Needs keys alone.

After Park et al., "KeyDiff: key similarity-based KV cache eviction for long-context LLM inference in
resource-constrained environments" (2025, arXiv:2504.15364).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer

MIN_NORM = 1e-8  # norms below it count as this, so that a key of zeros has the score 0


class KeyDiff(Scorer):
    """Scores a key by the negative cosine of its angle with the mean of its head's normalized keys."""

    def score(self, past: Past) -> Tensor:
        keys = past.keys
        norms: Tensor = torch.linalg.vector_norm(keys, dim=-1).clamp_min(MIN_NORM)
        mean = norms.reciprocal()[:, None, :] @ keys / keys.shape[1]  # [H, 1, D]
        mean_norm: Tensor = torch.linalg.vector_norm(mean, dim=-1).clamp_min(MIN_NORM)  # [H, 1]
        products = (keys @ mean.transpose(1, 2)).squeeze(-1)
        cosines: Tensor = products / (norms * mean_norm)
        return -cosines
