"""Draws tokens from logits as requests want them drawn. Knows positions of texts, and no requests.

The random number of a draw depends on (seed, position) only: not on the batch, the step or the strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import sampling as reference
from kernels.sampling import NO_TOKEN, Sample, SamplingRow
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.logits_processors import (
    EMPTY_HISTORY,
    TokenHistory,
    needs_logits_processing,
    process_logits,
)

MAX_SEED = 2**64 - 1


class Draw(NamedTuple):
    """One token to be drawn."""

    sampling: SamplingParams
    position: int  # of the token in its text
    history: TokenHistory = EMPTY_HISTORY  # the tokens before it, if penalties need them
    banned_token_ids: Collection[int] = ()  # tokens that may not be drawn


def draw_tokens(logits: Tensor, draws: Sequence[Draw], operation: Sample = reference.sample) -> list[int | None]:
    """Draw K token ids from logits [K, V], which are not changed; None where the logits are not finite."""
    rows = torch.from_numpy(_make_sampling_rows(draws))
    tokens = operation(logits, rows)
    if processed := [
        i for i, draw in enumerate(draws) if draw.banned_token_ids or needs_logits_processing(draw.sampling)
    ]:
        changed = [
            process_logits(logits[i].float(), draws[i].sampling, draws[i].history, draws[i].banned_token_ids)
            for i in processed
        ]
        drawn = operation(torch.stack(changed), rows[processed])
        tokens[processed] = drawn.masked_fill(tokens[processed] == NO_TOKEN, NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _make_sampling_rows(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """Return a `SamplingRow` [5] for each of K draws, as `Ops.sample` takes them; those of greedy draws are zeros."""
    rows = np.zeros((len(draws), len(SamplingRow._fields)))
    if random_draws := [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]:
        noise = Noise()
        for i in random_draws:
            sampling, position, _, _ = draws[i]
            u = noise.draw_uniform(sampling.seed, position)
            rows[i] = SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)
    return rows


class Noise:
    """Random numbers by seed and position: numpy's Philox 4x64 (Salmon et al. 2011).

    torch's CPU generators cannot be set to a counter.
    """

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
