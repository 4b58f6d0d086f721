"""Plots the measurements of tools.bench.growth, with a panel for each strategy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.growth.points import GrowthPoint
from tools.bench.table.report import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

TITLES = {
    "context": "one stream, by tokens in its cache",
    "streams": "streams decoded together",
    "waiting": "requests that wait",
    "blocks": "blocks in the prefix cache",
}
COLUMNS = 4
PANEL_INCHES = (3.0, 2.2)  # width, height
TITLE_INCHES = 0.6  # height of a part's title and axis label
DPI = 80
# Colours that stay apart for colour-blind readers (Okabe and Ito).
MEASURED, LIMIT, OTHER = "#0072B2", "#D55E00", "#BBBBBB"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
TICKS = {"context": (128, 1024, 8192, 32_000), "streams": (1, 4, 16, 128)}


def draw(points: Sequence[GrowthPoint], file: Path) -> list[Path]:
    """Write a picture of each model, as PNG or SVG by the file's ending; return the files.

    The first one has the name `file` and shows the parts without a model, too. Raises OSError, and ValueError for
    another ending.
    """
    models: list[str | None] = list(dict.fromkeys(point.model for point in points if point.model))
    files: list[Path] = []
    for model in models or [None]:
        also_counts = not files
        files.append(file if also_counts else file.with_stem(f"{file.stem}-{model}"))
        _draw_model([p for p in points if p.model == model or (also_counts and p.model is None)], files[-1])
    return files


def _draw_model(points: Sequence[GrowthPoint], file: Path) -> None:
    """Draw a group of panels for each part with times, and one group for all parts with counts."""
    from matplotlib.figure import Figure  # optional dependency

    parts = {part: [p for p in points if p.part == part] for part in dict.fromkeys(p.part for p in points)}
    times = [part for part in parts if parts[part][0].strategy]
    counts = [part for part in parts if part not in times]
    rows = [-(-len({p.strategy for p in parts[part]}) // COLUMNS) for part in times] + [1] * bool(counts)
    heights = [TITLE_INCHES + PANEL_INCHES[1] * each for each in rows]
    figure = Figure(figsize=(PANEL_INCHES[0] * COLUMNS, sum(heights)), layout="constrained")
    groups = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for group, part, height in zip(groups, times, rows, strict=False):
        _draw_times(group, part, parts[part], height)
    if counts:
        for axes, part in zip(groups[-1].subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
            _draw_counts(axes, part, parts[part])
    figure.savefig(file, dpi=DPI)


# -------------------------------------------------------------------- times
def _draw_times(group: SubFigure, part: str, points: Sequence[GrowthPoint], rows: int) -> None:
    """Draw a panel for each strategy, with the first strategy in grey behind the others."""
    strategies = list(dict.fromkeys(point.strategy for point in points))
    panels = group.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    first = [point for point in points if point.strategy == strategies[0]]
    for axes, strategy in zip(panels, strategies, strict=False):
        if strategy != strategies[0]:
            axes.plot(*_values(first), color=OTHER, linewidth=1.5)
        _draw_strategy(axes, [point for point in points if point.strategy == strategy])
        axes.set_title(strategy, fontsize=10, loc="left", fontweight="bold")
    for axes in panels[len(strategies) :]:
        axes.set_visible(False)
    _set_scales(panels[0], part, points)
    legend = f"{points[0].metric}; dashed: what the machine allows; grey: {strategies[0]}"
    group.suptitle(f"{points[0].model}, {TITLES[part]}: {legend}", fontsize=10, x=0.01, ha="left")


def _draw_strategy(axes: Axes, points: Sequence[GrowthPoint]) -> None:
    """Draw the times of a strategy and their limits, with the last of both at the right end."""
    sizes, values = _values(points)
    limits = [point.limit or 0.0 for point in points]
    low, high = zip(*(_range(point) for point in points), strict=True)
    axes.fill_between(sizes, low, high, color=MEASURED, alpha=0.2, linewidth=0)
    axes.plot(sizes, values, color=MEASURED, marker="o", markersize=2.5, linewidth=1.4)
    axes.plot(sizes, limits, color=LIMIT, linestyle="--", linewidth=1.2)
    for value, color, above in ((values[-1], MEASURED, 1), (limits[-1], LIMIT, -1)):
        text, offset = format_number(value), (4, 3 * above)
        alignment = "bottom" if above > 0 else "top"
        axes.annotate(
            text, (sizes[-1], value), offset, textcoords="offset points", color=color, fontsize=8, va=alignment
        )
    axes.margins(x=0.2, y=0.15)  # room for the labels
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def _values(points: Sequence[GrowthPoint]) -> tuple[list[int], list[float]]:
    return [point.size for point in points], [point.value for point in points]


def _range(point: GrowthPoint) -> tuple[float, float]:
    """Return the least and the largest value of all rounds."""
    times = [1e3 * each.seconds for each in point.rounds] or [point.value]
    return min(times), max(times)


def _set_scales(axes: Axes, part: str, points: Sequence[GrowthPoint]) -> None:
    """Set the scales that all panels of a part share; logarithmic, as strategies differ by a factor of ten."""
    sizes = {point.size for point in points}
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [size for size in TICKS[part] if size in sizes] or sorted(sizes)
    axes.set_xticks(ticks, [_format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,g}")


def _format_size(size: int) -> str:
    return f"{size // 1000}k" if size >= 10_000 else f"{size:,}"


# -------------------------------------------------------------------- counts
def _draw_counts(axes: Axes, part: str, points: Sequence[GrowthPoint]) -> None:
    """Draw a line for each metric, with its name."""
    for color, label in zip(LINES, dict.fromkeys(point.label for point in points), strict=False):
        ours = [point for point in points if point.label == label]
        axes.plot(*_values(ours), color=color, marker="o", markersize=2.5, linewidth=1.4, label=label)
    axes.set_xscale("symlog" if part == "waiting" else "log", base=10)
    axes.set_xlabel(TITLES[part], fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)
