"""Paired comparisons: published examples, coverage by enumeration, and what runs with other samples decide."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from server.evaluation.suites.paired import SuiteVerdict, compare_pairs, decide, estimate_difference
from server.rollouts.intervals import Estimate


def make_scores(both: int, only_exact: int, only_other: int, neither: int) -> tuple[list[float], list[float]]:
    exact = [1.0] * (both + only_exact) + [0.0] * (only_other + neither)
    other = [1.0] * both + [0.0] * only_exact + [1.0] * only_other + [0.0] * neither
    return exact, other


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        # statpsych's ci.prop.ps(.05, 12, 4, 26, 6), whose source is Bonett and Price (2012)
        ((6, 4, 26, 12), 0.2548067, 0.6251933),
        # Fagerland, Lydersen and Laake (2014), table V: n12 = 1, n21 = 7 of 21
        ((1, 1, 7, 12), 0.0133, 0.5084),
        ((1, 7, 1, 12), -0.5084, -0.0133),
    ],
)
def test_intervals_are_those_published(counts: tuple[int, int, int, int], low: float, high: float) -> None:
    difference = compare_pairs(*make_scores(*counts), margin=0.1).difference
    assert [difference.low, difference.high] == pytest.approx([low, high], abs=1e-4)


@pytest.mark.parametrize("count", [10, 26, 40])
@pytest.mark.parametrize(("lost", "gained"), [(0.05, 0.05), (0.1, 0.02), (0.3, 0.0), (0.25, 0.25), (0.6, 0.1)])
def test_intervals_hold_the_true_difference(count: int, lost: float, gained: float) -> None:
    """By all outcomes and their probabilities."""
    covered = 0.0
    for b in range(count + 1):
        for c in range(count + 1 - b):
            ways = math.comb(count, b) * math.comb(count - b, c)
            probability = ways * lost**b * gained**c * (1 - lost - gained) ** (count - b - c)
            interval = estimate_difference(count, (c - b) / count, (c + b) / count)
            covered += probability * (interval.low <= gained - lost <= interval.high)
    assert covered > 0.93


def test_intervals_of_partial_scores_hold_the_true_difference(rng: random.Random) -> None:
    """Differences of -1, -0.8, ... 1, of which most are 0."""
    values, weights = [i / 5 for i in range(-5, 6)], [4, 2, 2, 3, 5, 70, 4, 3, 3, 2, 2]
    truth = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    covered = 0
    for _ in range(2000):
        drawn = rng.choices(values, weights, k=30)
        interval = estimate_difference(30, fmean(drawn), fmean(v * v for v in drawn))
        covered += interval.low <= truth <= interval.high
    assert covered > 0.93 * 2000


@pytest.mark.parametrize(
    ("counts", "verdict", "needed"),
    [
        ((26, 0, 0, 0), SuiteVerdict.SAME, None),
        ((25, 0, 0, 0), SuiteVerdict.NOT_DECIDED, 26),
        ((10, 0, 0, 0), SuiteVerdict.NOT_DECIDED, 26),
        ((20, 20, 0, 0), SuiteVerdict.WORSE, None),
        ((36, 4, 0, 0), SuiteVerdict.NOT_DECIDED, None),  # on the margin: no number decides
        ((31, 0, 0, 9), SuiteVerdict.TOO_HARD, None),
        ((0, 31, 0, 9), SuiteVerdict.TOO_HARD, None),
        ((32, 0, 8, 0), SuiteVerdict.SAME, None),  # better
    ],
)
def test_verdicts(counts: tuple[int, int, int, int], verdict: SuiteVerdict, needed: int | None) -> None:
    comparison = compare_pairs(*make_scores(*counts), margin=0.1)
    assert (comparison.verdict, comparison.samples_needed) == (verdict, needed)


def test_as_many_samples_as_are_named_decide() -> None:
    comparison = compare_pairs(*make_scores(38, 2, 0, 0), margin=0.1)
    assert comparison.verdict is SuiteVerdict.NOT_DECIDED
    needed = comparison.samples_needed
    assert needed is not None
    verdicts = [decide(estimate_difference(n, -0.05, 0.05), 0.1) for n in (needed - 1, needed)]
    assert verdicts == [SuiteVerdict.NOT_DECIDED, SuiteVerdict.SAME]


def test_an_interval_that_holds_both_answers_decides_nothing() -> None:
    assert decide(Estimate(-0.05, -0.2, 0.1), 0.1) is SuiteVerdict.NOT_DECIDED
    assert decide(Estimate(-0.05, -0.1, 0.0), 0.1) is SuiteVerdict.SAME
    assert decide(Estimate(-0.3, -0.5, -0.11), 0.1) is SuiteVerdict.WORSE


def test_runs_with_other_samples_hardly_ever_contradict_each_other(rng: random.Random) -> None:
    """Strategies of every true loss, also on the margin, are measured twice."""
    contradictions = decided = 0
    for _ in range(3000):
        lost = rng.choice((0.0, 0.05, 0.1, 0.15, 0.2, 0.4))
        pair = {draw_verdict(rng, lost) for _ in range(2)}
        contradictions += pair == {SuiteVerdict.SAME, SuiteVerdict.WORSE}
        decided += bool(pair & {SuiteVerdict.SAME, SuiteVerdict.WORSE})
    assert decided > 1000
    assert contradictions <= 6


def draw_verdict(rng: random.Random, lost: float) -> SuiteVerdict:
    exact = [float(rng.random() < 0.95) for _ in range(40)]
    return compare_pairs(exact, [each * (rng.random() >= lost) for each in exact], margin=0.1).verdict
