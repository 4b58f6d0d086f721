"""Scorers as third parties might write them, each with one mistake."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer
from cache_strategies.scorers.h2o import H2O


class SoundScorer(Scorer):
    """Scores a key by its norm, averaged over boundaries, and makes no mistake."""

    def score(self, past: Past) -> Tensor:
        norms = past.keys.norm(dim=-1)
        old = past.key_state.get("norms", torch.zeros_like(norms))
        past.key_state["norms"] = norms + old
        past.state["boundaries"] = past.state.get("boundaries", torch.zeros(())) + 1
        return norms + old


class OneForAllHeads(Scorer):
    def score(self, past: Past) -> Tensor:
        return past.keys.norm(dim=-1).mean(0)


class NotANumber(Scorer):
    def score(self, past: Past) -> Tensor:
        return past.keys.norm(dim=-1).log() - past.positions.float().log() * 0


class Whim(Scorer):
    def score(self, past: Past) -> Tensor:
        return torch.rand_like(past.keys[..., 0])


class Normalizes(Scorer):
    """Divides the keys by their norms, in place."""

    def score(self, past: Past) -> Tensor:
        return past.keys.div_(2).norm(dim=-1)


class CountsCalls(Scorer):
    calls = 0

    def score(self, past: Past) -> Tensor:
        self.calls += 1
        return past.keys.norm(dim=-1) + self.calls


class RemembersTheLast(Scorer):
    """Keeps the mean key in the scorer, of whatever sequence came last with other tokens."""

    def __init__(self, options: object) -> None:
        super().__init__(options)
        self._mean: Tensor | None = None
        self._length = 0

    def score(self, past: Past) -> Tensor:
        if past.length <= self._length or self._mean is None:
            self._mean = past.keys.mean(1, keepdim=True)
        self._length = past.length
        return (past.keys - self._mean).norm(dim=-1)


class AddsInPlace(Scorer):
    def score(self, past: Past) -> Tensor:
        norms = past.keys.norm(dim=-1)
        total = past.state.setdefault("total", torch.zeros(()))
        total += norms.sum()
        return norms + total


class StoresFirst(Scorer):
    def score(self, past: Past) -> Tensor:
        past.state["boundaries"] = past.state.get("boundaries", torch.zeros(())) + 1
        return past.keys.norm(dim=-1) * past.state["boundaries"]


class WrongColumns(H2O):
    """Remembers a number for each head, not for each key."""

    def score(self, past: Past) -> Tensor:
        scores = past.keys.norm(dim=-1)
        past.key_state["mean"] = scores.mean(1, keepdim=True)
        return scores
