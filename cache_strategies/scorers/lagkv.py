"""lagkv: keeps the keys and values that vary most across channels, relative to the tokens after them.

Keys are cut into partitions of `lag_size`. Each channel of a partition is scaled by the minimum and maximum that it has
in the next partition; the standard deviation over the scaled channels tells how much a token stands out. Tokens are
then ranked within their partition, so that all partitions keep about as many. Needs keys and values.

After Liang et al., "LagKV: lag-relative information of the KV cache tells which tokens are important" (2025,
arXiv:2504.04704). The paper compresses a partition once, when the next one is full; here, partitions are those of the
kept keys at each boundary.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer, ScorerOptions

MIN_RANGE = 1e-9  # a channel that is constant in the next partition counts as having this range


class LagKVOptions(ScorerOptions):
    """Options of lagkv."""

    lag_size: int = Field(128, ge=2, le=65536, description="keys of a partition")
    sinks: int = Field(4, ge=0, le=65536, description="first keys of a text, which are kept and belong to no partition")


class LagKV(Scorer):
    """Scores a key by its rank in its partition, from 0 to 1; the keys that no partition follows are kept."""

    options_type = LagKVOptions
    options: LagKVOptions

    def score(self, past: Past) -> Tensor:
        lag, sinks = self.options.lag_size, self.options.sinks
        H, S = past.positions.shape
        num_partitions = max(S - sinks, 0) // lag
        if num_partitions < 2:
            return self._score_by_position(past)
        end = sinks + num_partitions * lag
        keys, values = (x[:, sinks:end].unflatten(1, (num_partitions, lag)) for x in (past.keys, past.values))
        order = (_score_spread(keys) + _score_spread(values)).argsort(dim=-1)  # [H, partitions - 1, lag]
        ranks = torch.empty_like(order, dtype=torch.float32)
        ranks.scatter_(-1, order, (torch.arange(lag, device=order.device) / lag).expand_as(order))
        scores = ranks.new_full((H, S), torch.inf)
        scores[:, sinks : end - lag] = ranks.flatten(1)
        return scores

    def _score_by_position(self, past: Past) -> Tensor:
        """Return scores for a text too short for two partitions: the sinks are kept, then the latest keys."""
        H, S = past.positions.shape
        scores = torch.arange(S, device=past.positions.device, dtype=torch.float32) / S
        scores[: self.options.sinks] = torch.inf
        return scores.expand(H, S)


def _score_spread(x: Tensor) -> Tensor:
    """Return how much tokens x [H, P, L, D] stand out within each partition but the last, [H, P - 1, L]."""
    D, following = x.shape[-1], x[:, 1:]
    low, high = following.amin(dim=2, keepdim=True), following.amax(dim=2, keepdim=True)
    inverse = (high - low).clamp_min_(MIN_RANGE).reciprocal_()
    scaled = torch.addcmul(-low * inverse, x[:, :-1], inverse)
    # about [0, 1], so the difference of squares is exact enough; Tensor.std takes ten times as long
    variance: Tensor = torch.linalg.vector_norm(scaled, dim=-1).square_()
    variance = variance.sub_(scaled.sum(dim=-1).square_(), alpha=1 / D).div_(D - 1)
    return variance.clamp_min_(0.0).sqrt_().softmax(dim=-1)
