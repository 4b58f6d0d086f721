"""Plots the samples of `python -m tools.bench growth`, with a panel for each strategy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tools.bench.report import format_number, group_by_row
from tools.bench.runner import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

COLUMNS = 4
PANEL_INCHES = (3.0, 2.2)  # width, height
TITLE_INCHES = 0.6  # height of a part's title and axis label
DPI = 80
# Colours that stay apart for colour-blind readers (Okabe and Ito).
MEASURED, LIMIT, OTHER = "#0072B2", "#D55E00", "#BBBBBB"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def draw(samples: Sequence[Sample], file: Path) -> None:
    """Write a picture with a group of panels for each table, as PNG or SVG by the file's ending.

    Raises OSError, and ValueError for another ending.
    """
    from matplotlib.figure import Figure  # optional dependency

    tables: dict[str, list[Sample]] = {}
    for each in samples:
        tables.setdefault(each.table.title, []).append(each)
    rows = [
        1 if own[0].table.variants_are_rows else -(-len({e.variant for e in own}) // COLUMNS) for own in tables.values()
    ]
    heights = [TITLE_INCHES + PANEL_INCHES[1] * each for each in rows]
    figure = Figure(figsize=(PANEL_INCHES[0] * COLUMNS, sum(heights)), layout="constrained")
    groups = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for group, (title, own), height in zip(groups, tables.items(), rows, strict=True):
        if own[0].table.variants_are_rows:
            _draw_counts(group.subplots(), title, own)
        else:
            _draw_times(group, title, own, height)
    figure.savefig(file, dpi=DPI)


def _draw_times(group: SubFigure, title: str, samples: Sequence[Sample], rows: int) -> None:
    """Draw a panel for each strategy, with the first strategy in grey behind the others."""
    strategies = list(dict.fromkeys(each.variant for each in samples if each.reading.value is not None))
    panels = group.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    first = [each for each in samples if each.variant == strategies[0]]
    for axes, strategy in zip(panels, strategies, strict=False):
        if strategy != strategies[0]:
            sizes, values, *_ = _collect(first)
            axes.plot(sizes, values, color=OTHER, linewidth=1.5)
        _draw_strategy(axes, [each for each in samples if each.variant == strategy])
        axes.set_title(strategy, fontsize=10, loc="left", fontweight="bold")
    for axes in panels[len(strategies) :]:
        axes.set_visible(False)
    panels[0].set_xscale("log", base=2)
    panels[0].set_yscale("log", base=2)
    panels[0].xaxis.set_major_formatter("{x:,g}")
    panels[0].yaxis.set_major_formatter("{x:,g}")
    legend = f"{samples[0].reading.row.unit}; dashed: what the machine allows; grey: {strategies[0]}"
    group.suptitle(f"{title}: {legend}", fontsize=10, x=0.01, ha="left")


def _collect(samples: Sequence[Sample]) -> tuple[list[int], list[float], list[float], list[float], list[float]]:
    """Return the sizes, and for each the median, the least and the largest of the values, and the limit's median."""
    points = []
    for row, of_row in group_by_row(samples):
        values = [each.reading.value for each in of_row if each.reading.value is not None]
        limits = [each.reading.limit or 0.0 for each in of_row]
        if values:
            points.append((_parse_size(row.what), median(values), min(values), max(values), median(limits)))
    sizes, *others = (list(column) for column in zip(*points, strict=True))
    return [int(size) for size in sizes], *others  # type: ignore[return-value]


def _parse_size(size: str) -> int:
    return int(size.replace(",", ""))


def _draw_strategy(axes: Axes, samples: Sequence[Sample]) -> None:
    """Draw the times of a strategy and their limits, with the last of both at the right end."""
    sizes, values, low, high, limits = _collect(samples)
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


def _draw_counts(axes: Axes, title: str, samples: Sequence[Sample]) -> None:
    """Draw a line for each count, with its name."""
    for color, (row, of_row) in zip(LINES, group_by_row(samples), strict=False):
        sizes = [_parse_size(each.variant) for each in of_row]
        values = [each.reading.value or 0 for each in of_row]
        axes.plot(sizes, values, color=color, marker="o", markersize=2.5, linewidth=1.4, label=row.what)
    axes.set_xscale("symlog", base=10)
    axes.set_xlabel(title, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)
