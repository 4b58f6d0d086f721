"""Compares two lists of scores of the same samples: the interval of their difference, and what it decides.

Plain statistics: knows neither tasks nor strategies. The interval is that of Bonett and Price, "Adjusted Wald
confidence interval for a difference of binomial proportions based on paired data" (Journal of Educational and
Behavioral Statistics 37, 2012): add one pair for each direction, and take Wald's interval. It has about its nominal
coverage from few samples on, and a width where all pairs agree. Scores between 0 and 1, as of answers of several
parts, get the same two pairs and the variance of their differences, which for 0 and 1 is the published formula. A
sample with several questions counts once, by the mean of their scores, as its answers depend on one context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from server.rollouts.intervals import Estimate, normal_quantile

CONFIDENCE = 0.95
LEAST_EXACT = 0.8  # a task that exact caching solves less well decides nothing
MAX_SAMPLES = 100_000  # more samples than these are not named


class SuiteVerdict(StrEnum):
    """What a comparison says about a strategy beside exact caching."""

    SAME = "same"  # worse by at most the margin, if at all
    WORSE = "worse"  # worse by more than the margin
    NOT_DECIDED = "not decided"  # the interval holds both answers
    TOO_HARD = "too hard for this model"  # exact caching solves too little


class PairedComparison(NamedTuple):
    """The difference of a strategy's mean score to the exact one, with its interval, and what follows."""

    difference: Estimate
    verdict: SuiteVerdict
    samples_needed: int | None = (
        None  # if it is not decided, about how many would decide it; None: more than any number
    )


def compare_pairs(exact: Sequence[float], other: Sequence[float], margin: float) -> PairedComparison:
    """Compare the scores of the same samples; differences up to `margin` count as none."""
    differences = [b - a for a, b in zip(exact, other, strict=True)]
    mean, square = fmean(differences), fmean(each * each for each in differences)
    estimate = estimate_difference(len(differences), mean, square)
    if fmean(exact) < LEAST_EXACT:
        return PairedComparison(estimate, SuiteVerdict.TOO_HARD)
    verdict = decide(estimate, margin)
    if verdict is not SuiteVerdict.NOT_DECIDED:
        return PairedComparison(estimate, verdict)
    return PairedComparison(estimate, verdict, count_needed(len(differences), mean, square, margin))


def estimate_difference(count: int, mean: float, square: float, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of differences with its interval, from their number, mean, and mean square."""
    padded = count + 2  # with one difference of 1 and one of -1
    center = count * mean / padded
    variance = (count * square + 2) / padded - center**2
    reach = normal_quantile(confidence) * math.sqrt(variance / padded)
    return Estimate(mean, max(-1.0, center - reach), min(1.0, center + reach))


def decide(difference: Estimate, margin: float) -> SuiteVerdict:
    """Return on which side of the margin an interval lies."""
    if difference.low >= -margin:
        return SuiteVerdict.SAME
    return SuiteVerdict.WORSE if difference.high < -margin else SuiteVerdict.NOT_DECIDED


def count_needed(count: int, mean: float, square: float, margin: float) -> int | None:
    """Return about how many samples decide, if further ones are like these; None if it would take too many."""

    def decides(samples: int) -> bool:
        return decide(estimate_difference(samples, mean, square), margin) is not SuiteVerdict.NOT_DECIDED

    low, high = count, 2 * count
    while not decides(high):
        if high > MAX_SAMPLES:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high
