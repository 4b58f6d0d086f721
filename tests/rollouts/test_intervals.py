"""Confidence intervals against published tables, plain formulas, and the share of random samples that they contain."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest

from server.rollouts.intervals import (
    clustered_mean,
    clustered_share,
    count_effective,
    quantile,
    quantile_ratio,
    student_quantile,
    wilson,
)

DRAWS = 600  # samples whose intervals are counted
SLACK = 0.05  # of the share that contains the truth; the standard error of a share of 0.95 is 0.009


@pytest.fixture
def draw(rng: random.Random) -> np.random.Generator:
    return np.random.default_rng(rng.randrange(2**32))


# ---------------------------------------------------------------- distributions
@pytest.mark.parametrize(
    ("degrees", "confidence", "published"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (5, 0.95, 2.5706),
        (10, 0.95, 2.2281),
        (30, 0.95, 2.0423),
        (60, 0.95, 2.0003),
        (100, 0.95, 1.9840),
        (1, 0.99, 63.6567),
        (7, 0.99, 3.4995),
        (49, 0.99, 2.6800),
        (1000, 0.99, 2.5808),
    ],
)
def test_quantiles_of_students_t_are_those_of_tables(degrees: int, confidence: float, published: float) -> None:
    assert student_quantile(degrees, confidence) == pytest.approx(published, abs=1e-4)


@pytest.mark.parametrize(
    ("ones", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)]
)
def test_wilsons_interval_is_the_published_one(ones: int, count: int, low: float, high: float) -> None:
    found = wilson(ones / count, count, 0.95)
    assert found == pytest.approx((ones / count, low, high), abs=1e-4)


# ---------------------------------------------------------------- means and shares
def test_the_mean_of_single_values_has_students_interval(draw: np.random.Generator) -> None:
    values = draw.exponential(size=20)
    found = clustered_mean(values, np.ones(20), 0.95)
    reach = 2.0930 * stdev(values) / math.sqrt(20)
    assert found == pytest.approx((fmean(values), fmean(values) - reach, fmean(values) + reach), rel=1e-4)


def test_the_mean_of_one_cluster_has_no_bounds() -> None:
    assert clustered_mean(np.array([3.0]), np.array([2.0]), 0.95) == (1.5, -math.inf, math.inf)


def test_intervals_of_correlated_values_contain_the_mean_as_often_as_they_say(draw: np.random.Generator) -> None:
    """Values of a cluster share a random part; an interval that took them for independent would be far too narrow."""
    contained, narrow = 0, 0
    for _ in range(DRAWS):
        counts = draw.integers(10, 40, size=25)
        clusters = [1 + draw.normal() + draw.normal(size=n) for n in counts]
        found = clustered_mean(np.array([c.sum() for c in clusters]), counts.astype(np.float64), 0.95)
        contained += found.low <= 1 <= found.high
        values = np.concatenate(clusters)
        narrow += abs(values.mean() - 1) <= 1.96 * values.std() / math.sqrt(len(values))
    assert contained / DRAWS == pytest.approx(0.95, abs=SLACK)
    assert narrow / DRAWS < 0.7


def test_intervals_of_correlated_shares_contain_the_share_as_often_as_they_say(draw: np.random.Generator) -> None:
    contained = 0
    for _ in range(DRAWS):
        counts = draw.integers(20, 40, size=40)
        sums = draw.binomial(counts, draw.beta(9, 1, size=40))  # the share of each cluster, 0.9 in the mean
        found = clustered_share(sums.astype(np.float64), counts.astype(np.float64), 0.95)
        contained += found.low <= 0.9 <= found.high
    assert contained / DRAWS == pytest.approx(0.95, abs=SLACK)


def test_equal_values_count_as_one_for_each_cluster() -> None:
    assert count_effective(np.full(7, 30.0), np.full(7, 30.0)) == 7
    low = clustered_share(np.full(7, 30.0), np.full(7, 30.0), 0.95).low
    assert low < 0.7, "seven requests without a difference do not prove that there is none"


# ---------------------------------------------------------------- quantiles
@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
def test_order_statistics_contain_a_quantile_as_often_as_they_say(q: float, draw: np.random.Generator) -> None:
    truth, contained = NormalDist().inv_cdf(q), 0
    for _ in range(DRAWS):
        found = quantile(draw.normal(size=700), q, 0.95)
        contained += found.low <= truth <= found.high
    assert contained / DRAWS >= 0.95 - SLACK / 2


def test_few_samples_leave_a_side_open() -> None:
    found = quantile(np.arange(20.0), 0.95, 0.95)
    assert found.value == 18.0
    assert found.low > -math.inf
    assert found.high == math.inf, "19 of 20 random samples lie below the quantile too often"
    assert quantile(np.array([]), 0.95, 0.95)[1:] == (-math.inf, math.inf)


def test_ratios_of_quantiles_contain_the_truth_as_often_as_they_say(draw: np.random.Generator) -> None:
    contained, one = 0, 0
    for _ in range(DRAWS):
        ours, theirs = 2 * draw.lognormal(size=200), draw.lognormal(size=300)
        found = quantile_ratio(ours, theirs, 0.95, 0.95)
        contained += found.low <= 2 <= found.high
        one += found.low <= 1 <= found.high
    assert contained / DRAWS >= 0.95 - SLACK / 2
    assert one / DRAWS < 0.4, "an interval that contains everything says nothing"
