"""Draws the next tokens from logits. Knows no request beyond how it wants its tokens drawn.

The noise of a draw depends on (seed, position) only: not on the batch, nor on the step, nor on the strategy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import sampling as plain
from kernels.sampling import NO_TOKEN, Drawing, Sample
from server.engine.adjust import adjusted
from server.engine.draw import Draw, adjusts

WORD = 2**64 - 1  # the largest seed


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


class _Philox(threading.local):
    """numpy's generator (Salmon et al. 2011), in each thread its own, as placing it and drawing are two calls."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.place = self.bits.state  # as nothing was drawn from it, no numbers wait in its buffer
        self.random = np.random.Generator(self.bits).random


_PHILOX = _Philox()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): the first of a Philox 4x64 with this key and counter, whatever was drawn before.

    Placing one anew takes a sixth of the time that making one does. torch's generators have no such place on the CPU.
    """
    words = _PHILOX.place["state"]
    words["key"][0], words["counter"][0] = seed & WORD, position
    _PHILOX.bits.state = _PHILOX.place
    return _PHILOX.random()
