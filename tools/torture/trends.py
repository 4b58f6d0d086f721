"""Fits a slope to numbers over time, robust against outliers: Theil and Sen, with Sen's interval.

Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

MAX_POINTS = 120  # longer series are cut into that many pieces, which count by their medians
MIN_POINTS = 8
Z = 1.96  # of a normal distribution, for 95 %

Point = tuple[float, float]  # time, value


@dataclass(frozen=True)
class Slope:
    """Change per unit of time, and its 95 % interval, which is too narrow where neighbours are correlated."""

    value: float
    low: float
    high: float


def fit_slope(points: Sequence[Point]) -> Slope | None:
    """Return the median of the slopes between any two points, and its interval; None for too few points."""
    points = thin_points(points, MAX_POINTS)
    if len(points) < MIN_POINTS:
        return None
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])
    low, high = _interval_ranks(len(points), len(slopes))
    return Slope(median(slopes), slopes[low], slopes[high])


def _interval_ranks(points: int, slopes: int) -> tuple[int, int]:
    """Return which of the sorted slopes bound the interval (Sen 1968)."""
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
    """Return the points after the middle of the time: by then caches have filled and pools have grown."""
    if not points:
        return points
    middle = (points[0][0] + points[-1][0]) / 2
    return [point for point in points if point[0] >= middle]
