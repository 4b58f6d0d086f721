"""Confidence intervals of means, shares, quantiles and ratios, also of tokens that are correlated within a request.

Plain statistics with numpy: knows neither requests nor guards. The methods, and why these:

- mean per token: a ratio estimator with one cluster per request, as the tokens of a request are correlated. Student's t
  with one degree of freedom less than requests, which is wide for few requests.
- share of tokens: Wilson's interval on the effective number of tokens. It never has a width of 0, unlike the normal
  interval when all tokens agree.
- quantile: order statistics, which assume nothing about the distribution. With too few samples a side is open. For
  tokens the effective number of samples is used (Woodruff).
- ratio of two quantiles: from the intervals of both (MOVER, Donner and Zou), in logarithms. A bootstrap would take a
  thousand times longer, and is too narrow for the 95th percentile of few samples.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Up to this number of degrees of freedom Student's t is inverted; above it, a series is exact enough
EXACT_DEGREES = 60


class Estimate(NamedTuple):
    """A figure with the two ends of its confidence interval."""

    value: float
    low: float
    high: float

    def describe(self) -> dict[str, float | None]:
        """Return the figure for JSON; None stands for what is infinite or unknown."""
        return {key: number if math.isfinite(number) else None for key, number in self._asdict().items()}


# ---------------------------------------------------------------- quantiles of distributions
def normal_quantile(confidence: float) -> float:
    """Return how many standard errors a two-sided normal interval reaches to each side."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@lru_cache(4096)
def student_quantile(degrees: int, confidence: float) -> float:
    """Return how many standard errors a two-sided interval of Student's t reaches to each side."""
    z = normal_quantile(confidence)
    if degrees > EXACT_DEGREES:  # the series of Abramowitz and Stegun, 26.7.5
        series = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return float(z + sum(term / degrees**power for power, term in enumerate(series, start=1)))
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < confidence else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    """Return the probability that a value of Student's t is between -t and t (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


# ---------------------------------------------------------------- means and shares
def clustered_mean(sums: Floats, counts: Floats, confidence: float) -> Estimate:
    """Return the mean of values that come in clusters: `sums` and `counts` are those of the values of each cluster."""
    clusters = len(sums)
    if not clusters:
        return Estimate(math.nan, -math.inf, math.inf)
    mean = float(sums.sum() / counts.sum())
    if clusters == 1:
        return Estimate(mean, -math.inf, math.inf)
    error = _clustered_error(sums, counts) * student_quantile(clusters - 1, confidence)
    return Estimate(mean, mean - error, mean + error)


def _clustered_error(sums: Floats, counts: Floats) -> float:
    """Return the standard error of a mean over clusters, of which there are two or more."""
    residuals = sums - counts * (sums.sum() / counts.sum())
    return math.sqrt(len(sums) / (len(sums) - 1) * float(residuals @ residuals)) / float(counts.sum())


def count_effective(sums: Floats, counts: Floats) -> float:
    """Return how many independent values tell as much about a share as these clusters of values that are 0 or 1.

    Between the number of clusters and that of values. If all values are equal, nothing tells how correlated those of a
    cluster are, and the number of clusters is returned, the least.
    """
    clusters, values = len(sums), float(counts.sum())
    share = float(sums.sum()) / values
    if clusters < 2 or not 0 < share < 1:
        return clusters
    return min(max(share * (1 - share) / max(_clustered_error(sums, counts) ** 2, 1e-300), clusters), values)


def clustered_share(sums: Floats, counts: Floats, confidence: float) -> Estimate:
    """Return the share of ones among values that come in clusters: their sums and their numbers."""
    if not len(sums):
        return Estimate(math.nan, 0.0, 1.0)
    effective = count_effective(sums, counts)
    if len(sums) > 1:  # the number itself is estimated from few clusters (Korn and Graubard)
        effective *= (normal_quantile(confidence) / student_quantile(len(sums) - 1, confidence)) ** 2
    return wilson(float(sums.sum() / counts.sum()), effective, confidence)


def wilson(share: float, count: float, confidence: float) -> Estimate:
    """Return Wilson's interval of a share of ones among `count` independent values."""
    if not count:
        return Estimate(math.nan, 0.0, 1.0)
    z = normal_quantile(confidence)
    centre, scale = share + z * z / (2 * count), 1 + z * z / count
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return Estimate(share, max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale))


# ---------------------------------------------------------------- quantiles of samples
def quantile(samples: NDArray[Any], q: float, confidence: float, effective: float | None = None) -> Estimate:
    """Return a quantile of samples by order statistics; an open side is infinite.

    `effective` is the number of independent samples that tell as much; None: the samples are independent.
    """
    count = len(samples)
    if not count:
        return Estimate(math.nan, -math.inf, math.inf)
    below, above = _quantile_ranks(count if effective is None else max(1, int(effective)), q, confidence)
    ranks = [min(count - 1, math.ceil(q * count) - 1)]
    low = None if below is None else max(0, math.floor(below * count) - 1)
    high = None if above is None else min(count - 1, math.ceil(above * count) - 1)
    ranks += [rank for rank in (low, high) if rank is not None]
    ordered = np.partition(samples, ranks)
    return Estimate(
        float(ordered[ranks[0]]),
        -math.inf if low is None else float(ordered[low]),
        math.inf if high is None else float(ordered[high]),
    )


@lru_cache(4096)
def _quantile_ranks(count: int, q: float, confidence: float) -> tuple[float | None, float | None]:
    """Return which order statistics of `count` samples enclose a quantile, as shares of them; None: no one does."""
    logs = np.log(np.arange(1, count + 1))
    factorials = np.concatenate(([0.0], np.cumsum(logs)))
    k = np.arange(count + 1)
    log_pmf = factorials[count] - factorials - factorials[::-1] + k * math.log(q) + (count - k) * math.log1p(-q)
    cdf = np.cumsum(np.exp(log_pmf))  # of the number of samples below the quantile
    tail = (1 - confidence) / 2
    # The rank r (from 1) is below the quantile unless fewer than r samples are: P(B <= r - 1)
    low = int(np.searchsorted(cdf, tail, side="right"))
    # and above it unless r or more samples are: P(B >= r) = 1 - P(B <= r - 1)
    high = int(np.searchsorted(cdf, 1 - tail, side="left")) + 1
    return (low / count if low >= 1 else None), (high / count if high <= count else None)


def quantile_ratio(
    samples: Floats, baseline: Floats, q: float, confidence: float, independent: tuple[int, int] | None = None
) -> Estimate:
    """Return the ratio of a quantile of two independent sets of positive samples.

    `independent` are the numbers of independent samples in both; None: all are.
    """
    counts = (len(samples), len(baseline)) if independent is None else independent
    ours, theirs = (
        quantile(np.log(np.maximum(each, 1e-9)), q, confidence, min(count, len(each)))
        for each, count in zip((samples, baseline), counts, strict=True)
    )
    difference = ours.value - theirs.value
    if math.isnan(difference):
        return Estimate(math.nan, 0.0, math.inf)
    low = difference - math.hypot(ours.value - ours.low, theirs.high - theirs.value)
    high = difference + math.hypot(ours.high - ours.value, theirs.value - theirs.low)
    return Estimate(math.exp(difference), math.exp(low), math.exp(min(high, 700.0)) if math.isfinite(high) else high)
