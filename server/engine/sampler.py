"""Draws the next tokens from logits. Knows no request beyond how it wants its tokens drawn.

The noise of a draw depends on (seed, position) only: not on the batch, nor on the step, nor on the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import sampling as plain
from kernels.sampling import NO_TOKEN, Drawing, Sample
from server.engine.adjust import adjusted
from server.engine.draw import Draw, adjusts

WORD = 2**64 - 1  # the largest that is multiplied, and what is kept of a sum
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # added to the key in each round
ROUNDS = 10


def sample(logits: Tensor, draws: Sequence[Draw], operation: Sample = plain.sample) -> list[int | None]:
    """logits [K, V], which stay as they are -> K token ids; None where the logits are no numbers."""
    how = torch.from_numpy(_drawings(draws))
    tokens = operation(logits, how)
    if changed := [i for i, draw in enumerate(draws) if draw.banned or adjusts(draw.sampling)]:
        ours = [adjusted(logits[i].float(), draws[i].sampling, draws[i].text, draws[i].banned) for i in changed]
        drawn = operation(torch.stack(ours), how[changed])
        tokens[changed] = drawn.masked_fill(tokens[changed] == NO_TOKEN, NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _drawings(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """[K, 5] as `Ops.sample` is told; greedy rows are zeros."""
    how = np.zeros((len(draws), len(Drawing._fields)))
    for i, (sampling, position, _, _) in enumerate(draws):
        if sampling.temperature > 0:
            noise = uniform(sampling.seed, position)
            how[i] = Drawing(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise)
    return how


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox 4x64; Salmon et al. 2011).

    numpy's first with this key and counter, which takes three times as long to make its generator.
    """
    a, b, c, d = (position + 1) & WORD, 0, 0, 0
    key, other = seed & WORD, 0
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> 64) ^ b ^ key, second & WORD, (first >> 64) ^ d ^ other, first & WORD
        key, other = (key + WEYL[0]) & WORD, (other + WEYL[1]) & WORD
    return (a >> 11) * 2.0**-53
