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
from config.units import Proportion

FIRST_KEYS = 32  # with which all keys are compared at first, then with twice as many
KEYS_AT_ONCE = 256  # the most: bounds the memory of similarities; few enough that they stay in a CPU's cache
OPEN_SHARE = 0.75  # keys are left out once fewer than this share of those that are compared still need it
MIN_NORM = 1e-8  # norms below it count as this, so that a key of zeros is similar to none


class RKVOptions(ScorerOptions):
    """Options of r_kv."""

    window: int = Field(8, ge=1, le=65536, description="latest tokens whose queries score the keys before them")
    kernel_size: int = Field(7, ge=1, le=4095, description="keys over which the largest weight counts; an odd number")
    mix_lambda: Proportion = Field(0.1, ge=0, le=1, description="weight of importance; redundancy has the rest")
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
        scores = mix * self._compute_importance(past, is_window) - (1 - mix) * self._compute_redundancy(past)
        return scores.masked_fill_(is_window, torch.inf)

    def _compute_importance(self, past: Past, is_window: Tensor) -> Tensor:
        """Return the largest mean attention weight of each key and its neighbours, [H, S]; 0 for keys of the window."""
        size = self.options.kernel_size
        scores = past.attention_scores().amax(dim=1).masked_fill_(is_window[:, None], -torch.inf)  # [H, T, S]
        sinks = past.sink_logits
        weights = softmax(scores, None if sinks is None else sinks.amax(dim=1))
        weights = weights.nan_to_num_(0.0).mean(dim=1)  # NaN: a query that sees no key before the window
        return F.max_pool1d(weights, size, stride=1, padding=size // 2)

    def _compute_redundancy(self, past: Past) -> Tensor:
        """Return the softmax of each key's mean cosine similarity with the other keys of its head, [H, S]."""
        keys, S = past.keys, past.positions.shape[1]
        norms = torch.linalg.vector_norm(keys, dim=-1)
        inverse = norms.clamp_min(MIN_NORM).reciprocal_()
        total = inverse[:, None] @ keys  # [H, 1, D], the sum of the normalized keys
        similarity = (keys @ total.transpose(1, 2))[..., 0] * inverse - (norms * inverse).square()
        normalized = torch.empty_like(keys, dtype=past.product_dtype)
        torch.mul(keys, inverse[..., None], out=normalized)
        for of_head, of_keys in zip(similarity, normalized, strict=True):
            latest, spared = find_latest_similar(of_keys, self.options.threshold)
            of_head.scatter_add_(0, latest.clamp_min(0), -spared)
        redundancy: Tensor = (similarity / S).softmax(dim=-1)
        return redundancy


def find_latest_similar(keys: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return for each key the latest of the others whose product with it exceeds a threshold, and the product.

    The keys [S, D] are normalized. Both results are [S]: -1 and 0 if there is none. The keys are compared with the
    latest ones first, and those for which one was found are left out soon: if keys resemble each other, few products
    of all pairs are needed.
    """
    S, device = len(keys), keys.device
    latest, product = torch.full((S,), -1, device=device), torch.zeros(S, device=device)
    rows, row_keys = torch.arange(S, device=device), keys  # those that are still compared
    stop, count = S, FIRST_KEYS
    while stop and len(rows):
        start = max(stop - count, 0)
        similarity = keys[start:stop] @ row_keys.T  # [n, rows]
        own = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
        similarity[rows[own] - start, own] = -torch.inf  # a key is not compared with itself
        is_open = latest[rows] < 0
        found = ((similarity.amax(dim=0) > threshold) & is_open).nonzero()[:, 0]
        if len(found):
            of_found = similarity[:, found]
            steps = torch.arange(1, stop - start + 1, device=device, dtype=torch.int16)[:, None]
            at = ((of_found > threshold) * steps).amax(dim=0).long() - 1
            latest[rows[found]] = start + at
            product[rows[found]] = of_found.gather(0, at[None])[0].float()
            is_open[found] = False
        if is_open.sum() < OPEN_SHARE * len(rows):
            rows = rows[is_open]
            row_keys = keys[rows]
        stop, count = start, min(2 * count, KEYS_AT_ONCE)
    return latest, product
