"""Samples the memory of processes, and fits slopes: the Theil-Sen estimator with Sen's confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np
import psutil

from tools.torture.server_process import ServerProcess

MIB, HOUR = 2**20, 3600.0
MAX_POINTS = 120  # longer series are divided into this many pieces, each of which is replaced by its median
MIN_POINTS = 8  # shorter series have no slope
Z = 1.96  # quantile of the normal distribution for an interval of 95 %

Point = tuple[float, float]  # time, value


@dataclass(frozen=True)
class Slope:
    """A change per unit of time with its 95 % interval, which is too narrow if successive points are correlated."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


@dataclass(frozen=True)
class Trend:
    """A time series of one process: its first and last value, and its slope per hour over the second half."""

    role: str
    first: float
    last: float
    slope: Slope | None

    def __str__(self) -> str:
        slope = "" if self.slope is None else f"; slope an hour, second half (95 %): {self.slope}"
        return f"{self.first:.1f} to {self.last:.1f}{slope}"

    def exceeds(self, bound: float) -> bool:
        return self.slope is not None and self.slope.low > bound


class MemorySamples:
    """Time series of the resident memory of the server's processes in MiB, by process name."""

    def __init__(self, server: ServerProcess) -> None:
        self.series: defaultdict[str, list[Point]] = defaultdict(list)
        self._server = server
        self._began = monotonic()

    def take(self) -> None:
        """Add one point to every series, except those of a process that has just ended."""
        hours = (monotonic() - self._began) / HOUR
        for role, process in name_processes(self._server).items():
            with suppress(psutil.NoSuchProcess):
                self.series[role].append((hours, process.memory_info().rss / MIB))

    def describe(self) -> str:
        """Return the latest memory of each process."""
        return "MiB: " + ", ".join(f"{role} {points[-1][1]:.0f}" for role, points in self.series.items())

    def fit_trends(self) -> list[Trend]:
        """Return the trend of every series."""
        return [
            Trend(role, points[0][1], points[-1][1], fit_slope(second_half(points)))
            for role, points in self.series.items()
        ]


def name_processes(server: ServerProcess) -> dict[str, psutil.Process]:
    """Return the server's processes by name; names stay the same as long as no process is replaced."""
    roles = server.find_roles()
    named = {"supervisor": server.find_processes()[0]}
    for name, processes in (("engine", roles.engines), ("worker", roles.workers), ("helper", roles.helpers)):
        named |= {
            name if name == "engine" else f"{name}-{i}": each
            for i, each in enumerate(sorted(processes, key=lambda process: process.pid))
        }
    return named


def fit_slope(points: Sequence[Point]) -> Slope | None:
    """Return the median of the slopes between all pairs of points; None if there are too few points."""
    if len(points) < MIN_POINTS:
        return None
    pieces = np.array_split(np.array(points), min(len(points), MAX_POINTS))
    times, values = np.array([np.median(piece, axis=0) for piece in pieces]).T
    earlier, later = np.triu_indices(len(times), 1)
    slopes = np.sort((values[later] - values[earlier]) / (times[later] - times[earlier]))
    # the slopes that bound the confidence interval (Sen 1968)
    half_width = Z * math.sqrt(len(times) * (len(times) - 1) * (2 * len(times) + 5) / 18)
    low, high = math.floor((len(slopes) - half_width) / 2), math.ceil((len(slopes) + half_width) / 2)
    return Slope(float(np.median(slopes)), float(slopes[max(0, low)]), float(slopes[min(len(slopes) - 1, high)]))


def second_half(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points after the middle of the time, when caches and pools have reached their size."""
    middle = (points[0][0] + points[-1][0]) / 2
    return [point for point in points if point[0] >= middle]
