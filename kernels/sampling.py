"""Sampling of tokens from logits in plain torch, on any device: defines what `Ops.sample` computes. Knows no text.

Computes on the device of the logits, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # returned for a row of logits that is not finite
BELOW_ONE = 1 - 2**-24  # the largest float32 below 1; a positive number times it becomes smaller
COLDEST = 1e-30  # the lowest temperature that float32 can divide by
Sample = Callable[[Tensor, Tensor], Tensor]  # a backend's `Ops.sample`


class SamplingFilter(Protocol):
    """The sampling parameters that determine the probabilities of tokens."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


class SamplingRow(NamedTuple):
    """The sampling parameters of one row of logits, as `Ops.sample` takes them."""

    temperature: float = 0.0
    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: float = 0.0  # in [0, 1)


def sample(logits: Tensor, params: Tensor) -> Tensor:
    """Draw a token for each row of logits, as `Ops.sample` defines it."""
    tokens = argmax_tokens(logits)
    finite = tokens != NO_TOKEN
    for i, each in enumerate(map(SamplingRow._make, params.tolist())):
        if each.temperature > 0:
            tokens[i] = draw_token(compute_probabilities(logits[i].float(), each), each.noise)
    return tokens.where(finite, NO_TOKEN)


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return the first index of the maximum of each row of logits [K, V]; NO_TOKEN if it is infinite or a NaN.

    On a CPU it uses numpy, whose argmax is twenty times as fast as torch's and returns a NaN first. On mps argmax
    ignores NaN.
    """
    if logits.device.type == "cpu":
        numbers = logits.float().numpy()
        tokens = numbers.argmax(-1)
        tokens[~np.isfinite(numbers[np.arange(len(tokens)), tokens])] = NO_TOKEN
        return torch.from_numpy(tokens)
    largest = logits.argmax(-1)
    finite = logits.gather(1, largest[:, None])[:, 0].isfinite() & ~logits.isnan().any(-1)
    return largest.masked_fill(~finite, NO_TOKEN)


def compute_probabilities(logits: Tensor, of: SamplingFilter) -> Tensor:
    """Return unnormalised probabilities [V] of logits [V], after temperature, min-p, top-k and top-p, in this order."""
    p = ((logits - logits.max()) / max(of.temperature, COLDEST)).softmax(-1)
    if of.min_p > 0:  # min-p (Nguyen et al. 2024): drops tokens less likely than this share of the likeliest
        p = p.masked_fill(p < of.min_p * p.max(), 0.0)
    if 0 < of.top_k < p.numel():
        p = p.masked_fill(~_mask_top_k(int(of.top_k), p), 0.0)
    if of.top_p < 1:  # top-p (Holtzman et al. 2020): keeps the fewest tokens that have this share of the probability
        ordered, ids = p.sort(descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = mass_before < of.top_p * p.sum()
        kept[0] = True  # one token is kept even if top_p times the sum is rounded to 0
        p = p.masked_fill(~kept.scatter(0, ids, kept), 0.0)
    return p


def draw_token(p: Tensor, u: float) -> Tensor:
    """Return the token, shape [], that u in [0, 1) selects: u lies in its interval of the cumulative sums of p [V]."""
    cumulated = p.cumsum(-1)
    return torch.searchsorted(cumulated, min(u, BELOW_ONE) * cumulated[-1], right=True)


def _mask_top_k(k: int, p: Tensor) -> Tensor:
    """Return a mask [V] of the k largest numbers; of equal ones the first are kept, unlike by torch.topk."""
    least = p.topk(k).values[-1]
    larger, equal = p > least, p == least
    return larger | (equal & (equal.cumsum(-1) <= k - larger.sum()))
