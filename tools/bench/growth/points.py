"""The measurements of tools.bench.growth, and their JSON. Measures and draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from statistics import median
from typing import Any

import psutil

from server.version import get_version
from tools.bench.table.report import read_processor_name

MS = "ms a step"


@dataclass(frozen=True)
class StepRound:
    """The decode steps of one strategy in one round, with the speeds of the machine just before them."""

    seconds: float  # of a step: the mean of the fastest fifth
    read_bytes: int  # that a step must read and write
    read_bandwidth: float  # bytes per second
    flops: int | None  # of a step's products with weights; None: unknown for this model
    flops_per_second: float  # of a large matrix product

    @property
    def limit_seconds(self) -> float:
        """The least seconds of a step: of reading its bytes once, or of its products, whichever take longer."""
        return max(self.read_bytes / self.read_bandwidth, (self.flops or 0) / self.flops_per_second)


@dataclass(frozen=True)
class GrowthPoint:
    """The figure of one size: the time of a step under a strategy, or a number of function calls."""

    part: str  # "context", "streams", "waiting" or "blocks"
    size: int  # number of tokens, streams, requests or blocks
    metric: str  # name and unit of `value`
    value: float  # of several rounds the median
    limit: float | None = None  # the best value that this machine allows, in the same rounds
    strategy: str | None = None  # the strategy instance; None if the metric does not depend on it
    model: str | None = None
    rounds: Sequence[StepRound] = ()

    @property
    def label(self) -> str:
        """The strategy, or the metric of all."""
        return self.strategy or self.metric


def summarize(part: str, size: int, strategy: str, model: str, rounds: Sequence[StepRound]) -> GrowthPoint:
    """Return the median time of a step over the rounds, and the median of the limits of these rounds."""
    value = 1e3 * median(each.seconds for each in rounds)
    limit = 1e3 * median(each.limit_seconds for each in rounds)
    return GrowthPoint(part, size, MS, value, limit, strategy, model, tuple(rounds))


def as_json(points: Sequence[GrowthPoint], date: datetime) -> dict[str, Any]:
    """Return the points, with all rounds, and the machine that they were measured on."""
    return {
        "date": date.isoformat(timespec="seconds"),
        "version": get_version(),
        "machine": {"processor": read_processor_name(), "processors": psutil.cpu_count()},
        "points": [asdict(point) for point in points],
    }


def read_points(report: Mapping[str, Any]) -> list[GrowthPoint]:
    """Return the points of a report that `as_json` made."""
    return [
        GrowthPoint(**point | {"rounds": tuple(StepRound(**each) for each in point["rounds"])})
        for point in report["points"]
    ]
