"""tova: keeps the keys that the last query attends to.

Attention weights of the last token are averaged over all heads of a layer, so all KV heads of a layer keep the same
tokens. Needs the last query alone, and so little memory.

After Oren et al., "Transformers are multi-state RNNs" (EMNLP 2024, arXiv:2401.06104). As in kvpress, the last token is
always kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer


class TOVA(Scorer):
    """Scores a token by its attention weight in the last query, averaged over the heads of the layer."""

    num_queries = 1

    def score(self, past: Past) -> Tensor:
        weights = past.attention_weights().mean(dim=(0, 1, 2))  # [S]: all heads hold the same tokens
        return weights.expand_as(past.positions).masked_fill(past.is_latest(1), torch.inf)
