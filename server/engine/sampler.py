"""Draws the next tokens from logits. Knows no request beyond how it wants its tokens drawn.

All is computed where the logits are, and the host waits for nothing but the drawn tokens, which come in one go.
The noise of a draw depends on (seed, position) only: not on the batch, nor on the step, nor on the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from server.engine.adjust import adjusted
from server.engine.draw import Draw, adjusts
from server.engine.messages import Sampling

NO_TOKEN = -1  # where the logits are no numbers
BELOW_ONE = 1 - 2**-24  # the float32 before 1: times any other it is less than that
COLDEST = 1e-30  # temperature; float32 could not divide by much less


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """logits [K, V] float32, which stay as they are -> K token ids; None where the logits are no numbers."""
    likeliest = _likeliest(logits)
    tokens = likeliest.clone()
    for i, (sampling, position, text, banned) in enumerate(draws):
        ours = logits[i]
        if changed := bool(banned) or adjusts(sampling):
            ours = adjusted(ours, sampling, text, banned)
        if sampling.temperature > 0:
            tokens[i] = draw(probabilities(ours, sampling), uniform(sampling.seed, position))
        elif changed:
            tokens[i] = _likeliest(ours[None])[0]
    tokens = tokens.masked_fill(likeliest == NO_TOKEN, NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest in each row [K]; NO_TOKEN if that is infinite, or a number of the row is NaN.

    On a CPU by numpy, whose argmax is twenty times as fast as torch's and finds NaN before all others; on mps argmax
    passes over NaN.
    """
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        tokens = numbers.argmax(-1)
        tokens[~np.isfinite(numbers[np.arange(len(tokens)), tokens])] = NO_TOKEN
        return torch.from_numpy(tokens)
    found = logits.argmax(-1)
    sound = logits.gather(1, found[:, None])[:, 0].isfinite() & ~logits.isnan().any(-1)
    return found.masked_fill(~sound, NO_TOKEN)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [V] -> what the token is drawn from [V]: temperature, then min-p, top-k and top-p, in this order."""
    p = ((logits - logits.max()) / max(sampling.temperature, COLDEST)).softmax(-1)
    if sampling.min_p > 0:  # Nguyen et al. 2024: less likely than this share of the likeliest
        p = p.masked_fill(p < sampling.min_p * p.max(), 0.0)
    if 0 < sampling.top_k < p.numel():
        p = p.masked_fill(~_first(sampling.top_k, p), 0.0)
    if sampling.top_p < 1:  # Holtzman et al. 2020: the fewest tokens that hold this much of the mass
        ordered, ids = p.sort(descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        kept = mass_before < sampling.top_p * p.sum()
        kept[0] = True  # also where the product is too small to be told from 0
        p = p.masked_fill(~kept.scatter(0, ids, kept), 0.0)
    return p


def draw(p: Tensor, u: float) -> Tensor:
    """The token [] whose stretch of the cumulated p [V] (not necessarily normalised) holds u in [0, 1)."""
    cumulated = p.cumsum(-1)
    return torch.searchsorted(cumulated, min(u, BELOW_ONE) * cumulated[-1], right=True)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox; Salmon et al. 2011)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(bits).random())


def _first(k: int, p: Tensor) -> Tensor:
    """Mask [V] of the k largest; of equal ones the first, which topk does not promise."""
    least = p.topk(k).values[-1]
    larger, equal = p > least, p == least
    return larger | (equal & (equal.cumsum(-1) <= k - larger.sum()))
