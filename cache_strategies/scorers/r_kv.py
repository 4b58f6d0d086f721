"""r_kv: keeps keys that the last queries attend to and that do not repeat others.

Made for reasoning models, whose long answers repeat themselves. The importance of a key is the attention weight that it
or a neighbour gets from the last `window` queries. Its redundancy is its mean cosine similarity with the other keys of
its head; for each key, the latest of the keys similar to it is spared, so that one copy of a repeated text stays. The
keys of the window are kept. Needs the last queries, and computes the similarity of all pairs of keys.

After Cai et al., "R-KV: redundancy-aware KV cache compression for reasoning models" (2025, arXiv:2505.24133). The order
of the steps, which decides the scale of both parts, is that of the authors' code: the maximum over a group's query
heads before the softmax, and the softmax over the keys before the window.
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from cache_strategies.scorers.base import Past, Scorer, ScorerOptions, check_kernel_size, softmax

KEYS_AT_ONCE = 128  # bounds the memory of similarities; few enough that they stay in a CPU's cache
MIN_NORM = 1e-8  # norms below it count as this, so that a key of zeros is similar to none


class RKVOptions(ScorerOptions):
    """Options of r_kv."""

    window: int = Field(8, ge=1, le=65536, description="latest tokens whose queries score the keys before them")
    kernel_size: int = Field(7, ge=1, le=4095, description="keys over which the largest weight counts; an odd number")
    mix_lambda: float = Field(0.1, ge=0, le=1, description="weight of importance; that of redundancy is one minus it")
    threshold: float = Field(0.5, ge=-1, le=1, description="cosine similarity above which a key repeats another")

    _check_kernel_size = field_validator("kernel_size")(check_kernel_size)


class RKV(Scorer):
    """Scores a key by lambda times its importance minus (1 - lambda) times its redundancy."""

    options_type = RKVOptions
    options: RKVOptions

    def __init__(self, options: RKVOptions) -> None:
        super().__init__(options)
        self.num_queries = options.window

    def score(self, past: Past) -> Tensor:
        mix = self.options.mix_lambda
        is_window = past.is_latest(self.options.window)
        scores = mix * self._compute_importance(past, is_window) - (1 - mix) * self._compute_redundancy(past.keys)
        return scores.masked_fill_(is_window, torch.inf)

    def _compute_importance(self, past: Past, is_window: Tensor) -> Tensor:
        """Return the largest mean attention weight of each key and its neighbours, [H, S]; 0 for keys of the window."""
        size = self.options.kernel_size
        scores = past.attention_scores().amax(dim=1).masked_fill_(is_window[:, None], -torch.inf)  # [H, T, S]
        sinks = past.sink_logits
        weights = softmax(scores, None if sinks is None else sinks.amax(dim=1))
        weights = weights.nan_to_num_(0.0).mean(dim=1)  # NaN: a query that sees no key before the window
        return F.max_pool1d(weights, size, stride=1, padding=size // 2)

    def _compute_redundancy(self, keys: Tensor) -> Tensor:
        """Return the softmax of each key's mean cosine similarity with the other keys of its head, [H, S]."""
        H, S, _ = keys.shape
        normalized = keys / torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min(MIN_NORM)
        normalized = normalized.contiguous()
        total = torch.zeros(H, S, device=keys.device)
        index = torch.arange(1, S + 1, device=keys.device, dtype=torch.float32)
        for start in range(0, S, KEYS_AT_ONCE):
            similarity = normalized[:, start : start + KEYS_AT_ONCE] @ normalized.transpose(1, 2)  # [H, n, S]
            similarity.diagonal(offset=start, dim1=1, dim2=2).zero_()
            total += similarity.sum(dim=1)
            # of the keys similar to a key, the latest is spared: it loses this key's contribution
            is_similar = torch.gt(similarity, self.options.threshold, out=torch.empty_like(similarity))  # 0.0 or 1.0
            latest = is_similar.mul_(index).amax(dim=-1).long() - 1  # [H, n]; -1: none
            column = latest.clamp_min(0)
            spared = similarity.gather(-1, column[..., None])[..., 0].masked_fill_(latest < 0, 0.0)
            total.scatter_add_(1, column, -spared)
        return (total / S).softmax(dim=-1)
