"""Fits a slope to a time series, robust against outliers: the Theil-Sen estimator with Sen's confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

MAX_POINTS = 120  # longer series are divided into so many pieces, each of which is replaced by its median
MIN_POINTS = 8  # shorter series have no slope
Z = 1.96  # quantile of the normal distribution for an interval of 95 %

Point = tuple[float, float]  # time, value


@dataclass(frozen=True)
class Slope:
    """A change per unit of time with its 95 % interval, which is too narrow if successive points are correlated."""

    value: float
    low: float
    high: float


def fit_slope(points: Sequence[Point]) -> Slope | None:
    """Return the median of the slopes between all pairs of points; None if there are too few points."""
    points = thin_points(points, MAX_POINTS)
    if len(points) < MIN_POINTS:
        return None
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])
    low, high = _interval_ranks(len(points), len(slopes))
    return Slope(median(slopes), slopes[low], slopes[high])


def _interval_ranks(points: int, slopes: int) -> tuple[int, int]:
    """Return the indices of the sorted slopes that bound the confidence interval (Sen 1968)."""
    half_width = Z * math.sqrt(points * (points - 1) * (2 * points + 5) / 18)
    low, high = math.floor((slopes - half_width) / 2), math.ceil((slopes + half_width) / 2)
    return max(0, low), min(slopes - 1, high)


def thin_points(points: Sequence[Point], max_points: int) -> Sequence[Point]:
    """Return at most `max_points` points: the medians of consecutive pieces."""
    if len(points) <= max_points:
        return points
    edges = [round(i * len(points) / max_points) for i in range(max_points + 1)]
    pieces = [points[a:b] for a, b in pairwise(edges)]
    return [(median(t for t, _ in piece), median(v for _, v in piece)) for piece in pieces]


def second_half(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points after the middle of the time, when caches and pools have reached their size."""
    if not points:
        return points
    middle = (points[0][0] + points[-1][0]) / 2
    return [point for point in points if point[0] >= middle]
