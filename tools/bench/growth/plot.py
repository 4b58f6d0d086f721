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
    strategy: str | None = None  # the strategy instance; None if the metric does not depend on it

    @property
    def label(self) -> str:
        """The strategy, or the metric of all."""
        return self.strategy or self.metric


def draw(points: Sequence[GrowthPoint], file: Path) -> None:
    """Write a PNG or SVG, by the file's ending. Raises OSError, and ValueError for another ending."""
    from matplotlib.figure import Figure  # optional dependency

    parts = list(dict.fromkeys(point.part for point in points))
    figure = Figure(figsize=(4.8 * len(parts), 4.2), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        _plot_part(axes, part, [point for point in points if point.part == part])
    figure.savefig(file, dpi=90)


def _plot_part(axes: Axes, part: str, points: Sequence[GrowthPoint]) -> None:
    """Plot a line for each strategy or metric, and a dashed one of the same colour for its bound."""
    for label in dict.fromkeys(point.label for point in points):
        ours = [point for point in points if point.label == label]
        sizes = [point.size for point in ours]
        (line,) = axes.plot(
            sizes, [point.value for point in ours], marker="o", markersize=3, linewidth=1.2, label=label
        )
        if all(point.bound is not None for point in ours):
            bounds = [point.bound or 0.0 for point in ours]
            axes.plot(sizes, bounds, linestyle="--", linewidth=0.8, color=line.get_color())
    axes.set_xscale("symlog" if part == "waiting" else "log", base=10 if part in ("waiting", "blocks") else 2)
    axes.set_xlabel(TITLES[part])
    if points[0].strategy is None:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log", base=2)  # strategies differ by a factor of ten
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel(f"{points[0].metric}; dashed: the machine allows")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
