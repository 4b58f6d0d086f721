"""Compares what two programs compute of the same tokens: log-probabilities, and greedy texts.

A text is cut into windows of equal length. The first part of a window is only read, and the tokens of the rest are
predicted. Knows neither of the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.bench.runner import Reading, Row

FloatArray = npt.NDArray[np.float64]


class Bounds(NamedTuple):
    """How far an exact strategy may be from llama.cpp with float32. docs/laboratory/validation.md gives the reasons."""

    perplexity: float  # relative
    mean_difference: float  # of log-probabilities, in nats
    near_tie: float  # nats between the two likeliest tokens, below which rounding may decide which of them comes first


class Predictions(NamedTuple):
    """The predictions of all positions of a text by one program, in order."""

    log_probs: FloatArray  # [positions]: of the token that follows, in nats
    likeliest: Sequence[frozenset[int]]  # [positions]: the likeliest token, or several if they are equally likely

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.log_probs.mean()))


class GreedyText(NamedTuple):
    """The greedy continuation of a prompt, without the token that ends the text.

    `margins` are the nats between the two likeliest tokens of each step, also of the one that ended the text.
    """

    token_ids: Sequence[int]
    margins: Sequence[float]


class Results(NamedTuple):
    """What one program computed in one way."""

    predictions: Predictions
    greedy: Sequence[GreedyText]


def compare(own: Results, base: Results, bounds: Bounds, *, exact: bool) -> Iterator[Reading]:
    """Yield the agreement of results with those of llama.cpp's first row; the bounds are goals if they are `exact`."""
    ratio, mean, clear = (100 * bounds.perplexity, bounds.mean_difference, 0) if exact else (None, None, None)
    predicted, expected = own.predictions, base.predictions
    assert len(predicted.log_probs) == len(expected.log_probs), "predictions of different positions"
    differences = np.abs(predicted.log_probs - expected.log_probs)
    same_top = [bool(a & b) for a, b in zip(predicted.likeliest, expected.likeliest, strict=True)]
    change = abs(predicted.perplexity / expected.perplexity - 1)
    yield Reading(Row("perplexity", digits=5), predicted.perplexity)
    yield Reading(Row("differs from llama.cpp's by", "%", goal=ratio), 100 * change)
    yield Reading(Row("log-probability, mean difference", "nats", goal=mean), float(differences.mean()))
    yield Reading(Row("largest difference", "nats"), float(differences.max()))
    yield Reading(Row("same likeliest token", "%", lower_is_better=False), 100 * sum(same_top) / len(same_top))
    equal = [count_equal(a.token_ids, b.token_ids) for a, b in zip(own.greedy, base.greedy, strict=True)]
    margins = find_margins(own.greedy, base.greedy)
    num_texts, num_tokens = len(equal), sum(len(text.token_ids) for text in base.greedy)
    yield Reading(Row("greedy texts equal", f"of {num_texts}", lower_is_better=False), num_texts - len(margins))
    tokens = 100 * sum(equal) / num_tokens if num_tokens else 100.0  # before the first difference of each text
    yield Reading(Row("greedy tokens equal", "%", lower_is_better=False), tokens)
    yield Reading(Row("clear differences", goal=clear), sum(margin >= bounds.near_tie for margin in margins))


def find_margins(own: Sequence[GreedyText], base: Sequence[GreedyText]) -> list[float]:
    """Return the margin of the first difference of each text that is not equal, the larger one of the two.

    A program that is wrong may see a tie where there is none.
    """
    margins = []
    for ours, theirs in zip(own, base, strict=True):
        if list(ours.token_ids) != list(theirs.token_ids):
            at = count_equal(ours.token_ids, theirs.token_ids)
            margins.append(max(ours.margins[at], theirs.margins[at]))
    return margins


def strip_end(token_ids: Sequence[int], eos_ids: frozenset[int]) -> Sequence[int]:
    """Return the tokens of a text without the token that ends it: not every program counts it among them."""
    return token_ids[:-1] if token_ids and token_ids[-1] in eos_ids else token_ids


def count_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
