"""Plots the measurements of tools.bench.growth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "context": "tokens in the cache",
    "sequences": "sequences decoded together",
    "waiting": "requests that wait",
    "blocks": "blocks in the prefix cache",
}


class GrowthPoint(NamedTuple):
    """One measurement of tools.bench.growth."""

    part: str  # a key of TITLES
    size: int  # number of tokens, sequences, requests or blocks
    metric: str  # name and unit of `value`
    value: float
    bound: float | None = None  # the best value that this machine's memory bandwidth allows


def draw(points: Sequence[GrowthPoint], file: Path) -> None:
    """Write a PNG or SVG, by the file's ending. Raises OSError, and ValueError for another ending."""
    from matplotlib.figure import Figure  # optional dependency

    parts = list(dict.fromkeys(point.part for point in points))
    figure = Figure(figsize=(4.2 * len(parts), 3.4), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        _plot_part(axes, part, [point for point in points if point.part == part])
    figure.savefig(file, dpi=90)


def _plot_part(axes: Axes, part: str, points: Sequence[GrowthPoint]) -> None:
    for metric in dict.fromkeys(point.metric for point in points):
        ours = [point for point in points if point.metric == metric]
        sizes = [point.size for point in ours]
        axes.plot(sizes, [point.value for point in ours], marker="o", markersize=3, linewidth=1.2, label=metric)
        if all(point.bound is not None for point in ours):
            bounds = [point.bound or 0.0 for point in ours]
            axes.plot(sizes, bounds, linestyle="--", linewidth=1, color="grey", label="the machine allows")
    axes.set_xscale("symlog" if part == "waiting" else "log", base=10 if part in ("waiting", "blocks") else 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(TITLES[part])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
