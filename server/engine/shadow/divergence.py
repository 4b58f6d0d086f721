"""Measures how far the logits of two instances are from each other, token by token. Knows no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Divergence(NamedTuple):
    """How far a shadow's prediction of one token is from the served one."""

    kl: float  # KL divergence KL(served || shadow), or KL(shadow || served) if the shadow is the reference; nats
    agreed: bool  # whether both have the same likeliest token
    rank: int  # rank of the token under the shadow; 1: the likeliest

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.kl)


def measure_divergence(
    served: Tensor, shadow: Tensor, tokens: Sequence[int], is_reference: Sequence[bool] | None = None
) -> list[Divergence]:
    """Return the divergence at each of n tokens from the logits [n, V] that predicted them.

    `is_reference` says of each token whether the shadow, not the served instance, is the reference of the divergence.
    The logits are those before temperature and penalties, as in `kvmux evaluate`. If any of them is NaN, so is the
    divergence. A token whose logit equals others has the best rank among them.
    """
    served, shadow = served.float(), shadow.float()
    log_p, log_q = served.log_softmax(-1), shadow.log_softmax(-1)
    if is_reference is not None and any(is_reference):
        swapped = torch.tensor(is_reference, device=log_p.device).unsqueeze(-1)
        log_p, log_q = torch.where(swapped, log_q, log_p), torch.where(swapped, log_p, log_q)
    p = log_p.exp()
    # A token of probability 0 adds nothing. Rounding may make the sum slightly negative; NaN stays.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp_min(0)
    kl = kl.masked_fill((log_p + log_q).isnan().any(-1), math.nan)
    agreed = served.argmax(-1) == shadow.argmax(-1)
    drawn = shadow.gather(-1, torch.tensor(tokens, device=shadow.device).unsqueeze(-1))
    rank = (shadow > drawn).sum(-1) + 1
    # One copy from the device. float32, as mps has no float64, holds every rank below 2^24 exactly.
    rows = torch.stack([kl, agreed.float(), rank.float()], dim=-1).tolist()
    return [Divergence(value, bool(same), int(place)) for value, same, place in rows]
