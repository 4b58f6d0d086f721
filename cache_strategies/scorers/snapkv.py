"""snapkv: keeps the keys that the last queries attend to, and their neighbours.

The attention weights of the last `window` queries are averaged and smoothed over neighbouring keys, so that short
passages stay together. The keys of the window itself are kept. Needs the last queries. It works best if a prompt ends
with the question: without it, the last queries do not know what will matter.

After Li et al., "SnapKV: LLM knows what you are looking for before generation" (NeurIPS 2024, arXiv:2404.14469); the
mean over a group's query heads as in kvpress.
"""

from __future__ import annotations

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from cache_strategies.scorers.base import Past, Scorer, ScorerOptions, check_kernel_size


class SnapKVOptions(ScorerOptions):
    """Options of snapkv."""

    window: int = Field(64, ge=1, le=65536, description="latest tokens whose queries score the keys before them")
    kernel_size: int = Field(5, ge=1, le=4095, description="keys over which weights are smoothed; an odd number")

    _check_kernel_size = field_validator("kernel_size")(check_kernel_size)


class SnapKV(Scorer):
    """Scores a key by the mean attention weight that it and its neighbours get from the last queries."""

    options_type = SnapKVOptions
    options: SnapKVOptions

    def __init__(self, options: SnapKVOptions) -> None:
        super().__init__(options)
        self.num_queries = options.window

    def score(self, past: Past) -> Tensor:
        size = self.options.kernel_size
        is_window = past.is_latest(self.options.window)
        num_weights = past.num_groups * len(past.queries)
        weights = (past.sum_attention_weights() / num_weights).masked_fill_(is_window, 0.0)
        smoothed = F.avg_pool1d(weights, size, stride=1, padding=size // 2)
        return smoothed.masked_fill_(is_window, torch.inf)
