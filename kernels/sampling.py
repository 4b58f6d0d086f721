"""How tokens are drawn from logits, in plain torch on any device: what `Ops.sample` means. Knows no text.

All is computed where the logits are, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # where the logits are not numbers
BELOW_ONE = 1 - 2**-24  # the float32 before 1: times any other it is less than that
COLDEST = 1e-30  # temperature; float32 could not divide by much less
Sample = Callable[[Tensor, Tensor], Tensor]  # a backend's `Ops.sample`


class SamplingFilter(Protocol):
    """Which tokens may come, and how likely they are."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


class SamplingRow(NamedTuple):
    """How `Ops.sample` draws one row's token."""

    temperature: float = 0.0
    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: float = 0.0  # in [0, 1)


def sample(logits: Tensor, params: Tensor) -> Tensor:
    """Draw tokens as `Ops.sample` says."""
    tokens = argmax_tokens(logits)
    finite = tokens != NO_TOKEN
    for i, each in enumerate(map(SamplingRow._make, params.tolist())):
        if each.temperature > 0:
            tokens[i] = draw_token(compute_probabilities(logits[i].float(), each), each.noise)
    return tokens.where(finite, NO_TOKEN)


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return the first of the largest in each row [K]; NO_TOKEN if that is infinite, or a number of the row is NaN.

    On a CPU by numpy, whose argmax is twenty times as fast as torch's and finds NaN before all others; on mps argmax
    passes over NaN.
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
    """Return what a token is drawn from [V], of logits [V]: temperature, min-p, top-k and top-p, in this order."""
    p = ((logits - logits.max()) / max(of.temperature, COLDEST)).softmax(-1)
    if of.min_p > 0:  # Nguyen et al. 2024: less likely than this share of the likeliest
        p = p.masked_fill(p < of.min_p * p.max(), 0.0)
    if 0 < of.top_k < p.numel():
        p = p.masked_fill(~_mask_top_k(int(of.top_k), p), 0.0)
    if of.top_p < 1:  # Holtzman et al. 2020: the fewest tokens that hold this much of the mass
        ordered, ids = p.sort(descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = mass_before < of.top_p * p.sum()
        kept[0] = True  # also where the product is too small to be told from 0
        p = p.masked_fill(~kept.scatter(0, ids, kept), 0.0)
    return p


def draw_token(p: Tensor, u: float) -> Tensor:
    """Return the token [] whose stretch of the cumulated p [V] (not necessarily normalised) holds u in [0, 1)."""
    cumulated = p.cumsum(-1)
    return torch.searchsorted(cumulated, min(u, BELOW_ONE) * cumulated[-1], right=True)


def _mask_top_k(k: int, p: Tensor) -> Tensor:
    """Mask [V] of the k largest; of equal ones the first, which topk does not promise."""
    least = p.topk(k).values[-1]
    larger, equal = p > least, p == least
    return larger | (equal & (equal.cumsum(-1) <= k - larger.sum()))
