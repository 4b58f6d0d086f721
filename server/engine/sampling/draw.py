"""Draws tokens from logits with each request's sampling parameters. Knows positions in texts, and no requests.

The random number of a draw depends only on (seed, position): not on the batch, the step or the strategy.
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
NOTHING_ALLOWED = -2  # returned for a row of which the grammar, with other parameters, allows no token


class Draw(NamedTuple):
    """The parameters with which one token is drawn."""

    sampling: SamplingParams
    position: int  # index of the token in prompt + output
    history: TokenHistory = EMPTY_HISTORY  # the tokens before this one; may be empty if no penalty is set
    banned_token_ids: Collection[int] = ()  # tokens that may not be drawn
    allowed: NDArray[np.bool_] | None = None  # which tokens [V] the grammar of the text allows; None: all

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the token is drawn: by penalties, biases, banned tokens or a grammar."""
        banned_or_allowed = bool(self.banned_token_ids) or self.allowed is not None
        return banned_or_allowed or needs_logits_processing(self.sampling)


def draw_tokens(logits: Tensor, draws: Sequence[Draw], operation: Sample = reference.sample) -> list[int | None]:
    """Draw a token id from each row of logits [K, V]; None for a row with NaN or infinity. Leaves `logits` unchanged.

    NOTHING_ALLOWED for a row with a grammar by which no token may be drawn. `operation` is a backend's `Ops.sample`.
    """
    rows = torch.from_numpy(_make_sampling_rows(draws))
    tokens = operation(logits, rows)
    if processed := [i for i, draw in enumerate(draws) if draw.changes_logits]:
        changed = [
            process_logits(
                logits[i].float(), draws[i].sampling, draws[i].history, draws[i].banned_token_ids, draws[i].allowed
            )
            for i in processed
        ]
        redrawn = operation(torch.stack(changed), rows[processed])
        constrained = torch.tensor([draws[i].allowed is not None for i in processed], device=redrawn.device)
        redrawn = redrawn.masked_fill(constrained & (redrawn == NO_TOKEN), NOTHING_ALLOWED)
        tokens[processed] = redrawn.masked_fill(tokens[processed] == NO_TOKEN, NO_TOKEN)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _make_sampling_rows(draws: Sequence[Draw]) -> NDArray[np.float64]:
    """Return the `SamplingRow` [K, 5] of each draw, the input of `Ops.sample`; rows of greedy draws are zeros."""
    rows = np.zeros((len(draws), len(SamplingRow._fields)))
    if random_draws := [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]:
        noise = Noise()
        for i in random_draws:
            sampling, position, *_ = draws[i]
            u = noise.draw_uniform(sampling.seed, position)
            rows[i] = SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)
    return rows


class Noise:
    """Random numbers determined by seed and position, from numpy's counter-based Philox 4x64 (Salmon et al. 2011).

    torch's CPU generators are not used, as they cannot be set to a counter.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state  # state before the first draw, when the buffer of unused numbers is empty
        self._random = np.random.Generator(self._bits).random

    def draw_uniform(self, seed: int, position: int) -> float:
        """Return a number in [0, 1), the same in every call with this seed and position."""
        words = self._state["state"]
        words["key"][0], words["counter"][0] = seed & MAX_SEED, position
        self._bits.state = self._state  # setting the state takes a sixth of the time of making a new generator
        return self._random()
