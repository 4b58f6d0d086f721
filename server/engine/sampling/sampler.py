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
from kernels.sampling import NO_TOKEN, Sample, SamplingRow
from server.engine.sampling.draw import Draw, needs_logits_processing
from server.engine.sampling.logits_processors import process_logits

MAX_SEED = 2**64 - 1


def sample(logits: Tensor, draws: Sequence[Draw], operation: Sample = plain.sample) -> list[int | None]:
    """Draw K token ids from logits [K, V], which are not changed; None where the logits are not numbers."""
    how = torch.from_numpy(_make_drawings(draws))
    tokens = operation(logits, how)
    if changed := [
        i for i, draw in enumerate(draws) if draw.banned_token_ids or needs_logits_processing(draw.sampling)
    ]:
        ours = [
            process_logits(logits[i].float(), draws[i].sampling, draws[i].history, draws[i].banned_token_ids)
            for i in changed
        ]
        drawn = operation(torch.stack(ours), how[changed])
        tokens[changed] = drawn.masked_fill(tokens[changed] == NO_TOKEN, NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _make_drawings(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """[K, 5] as `Ops.sample` is told; greedy rows are zeros."""
    how = np.zeros((len(draws), len(SamplingRow._fields)))
    if warm := [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]:
        noise = Noise()
        for i in warm:
            sampling, position, _, _ = draws[i]
            at = noise.draw_uniform(sampling.seed, position)
            how[i] = SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, at)
    return how


class Noise:
    """numpy's Philox 4x64 (Salmon et al. 2011). torch's CPU generators cannot be set to a counter."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state  # as nothing was drawn from it, no numbers wait in its buffer
        self._random = np.random.Generator(self._bits).random

    def draw_uniform(self, seed: int, position: int) -> float:
        """Return a number in [0, 1): the first with this key and counter, whatever was drawn before."""
        words = self._state["state"]
        words["key"][0], words["counter"][0] = seed & MAX_SEED, position
        self._bits.state = self._state  # takes a sixth of the time that another generator does
        return self._random()
