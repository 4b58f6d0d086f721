"""random: keeps keys at random, as a control: a scorer that is not better than this one is of no use.

A key's number depends on its position, its layer, its head and the option `seed` alone. So a text that is computed
again keeps the same keys, and a kept key has the same number at the next boundary. As each head of each layer draws
other keys, almost every token stays in some of them, which is worth more than one would expect; `per_head = false` is
the control for methods that choose tokens.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer, ScorerOptions

_MASK = 0xFFFFFFFF


class RandomOptions(ScorerOptions):
    """Options of random."""

    seed: int = Field(0, ge=0, le=_MASK, description="seed of the random numbers")
    per_head: bool = Field(True, description="draw other keys in each head and layer; false: the same tokens in all")


class RandomScorer(Scorer):
    """Scores a key by a hash of its position, layer and head, as a number from 0 to 1."""

    options_type = RandomOptions
    options: RandomOptions

    def score(self, past: Past) -> Tensor:
        positions = past.positions
        heads = _hash(torch.full((len(positions),), self.options.seed, device=positions.device))
        if self.options.per_head:
            heads = _hash(_hash(heads + past.layer_idx) + torch.arange(len(positions), device=positions.device))
        return _hash(heads[:, None] + positions).float() / 2**32


def _hash(x: Tensor) -> Tensor:
    """Return hashes of integers x, which count modulo 2^32: a one-to-one map of [0, 2^32) onto itself, int64.

    The constants are those of Wellons' `lowbias32`. Products overflow 64 bits; their low 32 bits are right.
    """
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
