"""Holds what a program predicts of the tokens of a text, and compares it with another program's predictions.

A text is cut into windows of equal length. The first part of a window is only read, and the tokens of the rest are
predicted. Knows neither of the programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """The predictions of all positions of a text by one program, in order."""

    log_probs: FloatArray  # [positions]: of the token that follows, in nats
    likeliest: Sequence[frozenset[int]]  # [positions]: the likeliest token, or several if they are equally likely
    perplexity: float

    @classmethod
    def from_log_probs(cls, log_probs: Sequence[float], likeliest: Sequence[frozenset[int]]) -> Predictions:
        """Return predictions whose log-probabilities are all exact."""
        array = np.array(log_probs)
        return cls(array, likeliest, math.exp(-float(array.mean())))


class GreedyText(NamedTuple):
    """The greedy continuation of a prompt, without the token that ends the text.

    `margins` are the nats between the two likeliest tokens of each step, also of the one that ended the text.
    """

    token_ids: Sequence[int]
    margins: Sequence[float]


@dataclass(frozen=True)
class Agreement:
    """The agreement of one program or strategy with another one that computed the same text."""

    positions: int
    perplexity: float
    perplexity_ratio: float  # 1: equal
    mean_difference: float  # of log-probabilities, absolute, in nats
    max_difference: float
    same_top: float  # share of positions with the same likeliest token

    @classmethod
    def between(cls, own: Predictions, other: Predictions) -> Agreement:
        """Compare predictions of the same positions."""
        assert len(own.log_probs) == len(other.log_probs), "predictions of different positions"
        differences = np.abs(own.log_probs - other.log_probs)
        same = [bool(a & b) for a, b in zip(own.likeliest, other.likeliest, strict=True)]
        return cls(
            len(same),
            own.perplexity,
            own.perplexity / other.perplexity,
            float(differences.mean()),
            float(differences.max()),
            sum(same) / len(same),
        )


@dataclass(frozen=True)
class GreedyAgreement:
    """The agreement of greedy texts with those of another program, from the same prompts."""

    texts: int
    equal_texts: int
    tokens: int  # of the other program's texts
    equal_tokens: int  # before the first difference of each text
    margins: Sequence[float]  # of the first difference of each text that is not equal, the larger one of the two

    @classmethod
    def between(cls, own: Sequence[GreedyText], other: Sequence[GreedyText]) -> GreedyAgreement:
        """Compare texts by the first token in which they differ."""
        equal = [count_equal(a.token_ids, b.token_ids) for a, b in zip(own, other, strict=True)]
        margins = [
            max(ours.margins[at], theirs.margins[at])  # a program that is wrong may see a tie where there is none
            for ours, theirs, at in zip(own, other, equal, strict=True)
            if list(ours.token_ids) != list(theirs.token_ids)
        ]
        return cls(
            len(equal),
            len(equal) - len(margins),
            sum(len(text.token_ids) for text in other),
            sum(equal),
            margins,
        )

    def count_clear(self, near_tie: float) -> int:
        """Return the number of texts that part where the two likeliest tokens are at least `near_tie` nats apart."""
        return sum(margin >= near_tie for margin in self.margins)


def strip_end(token_ids: Sequence[int], eos_ids: frozenset[int]) -> Sequence[int]:
    """Return the tokens of a text without the token that ends it: not every program counts it among them."""
    return token_ids[:-1] if token_ids and token_ids[-1] in eos_ids else token_ids


def count_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
