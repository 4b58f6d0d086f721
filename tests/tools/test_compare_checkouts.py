"""The interval of a median has its probability for any distribution."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from tools.compare_checkouts import compute_coverage, compute_interval


def count_orders(count: int, low: int, high: int) -> float:
    """Return the share of all outcomes, each value below or above the median, with it between these ranks."""
    sums = [sum(outcome) for outcome in product((0, 1), repeat=count)]
    return sum(low < below <= high for below in sums) / len(sums)


@pytest.mark.parametrize("count", range(1, 15))
def test_an_interval_is_the_narrowest_with_its_probability(count: int) -> None:
    low, high = map(int, compute_interval([*range(count)]))
    assert low + high == count - 1
    coverage = count_orders(count, low, high)
    assert compute_coverage(count) == pytest.approx(coverage)
    if count < 6:
        assert (low, high) == (0, count - 1)
        assert coverage < 0.95
    else:
        assert coverage >= 0.95
        assert count_orders(count, low + 1, high - 1) < 0.95


def test_the_true_median_is_in_the_interval_as_often_as_it_should(rng: random.Random) -> None:
    count, trials = rng.randint(2, 60), 4000
    skewed = np.random.default_rng(rng.randrange(1 << 32)).exponential(size=(trials, count))
    found = [low <= np.log(2) <= high for low, high in map(compute_interval, skewed.tolist())]
    deviation = np.sqrt(0.25 / trials)
    assert np.mean(found) == pytest.approx(compute_coverage(count), abs=5 * deviation)
