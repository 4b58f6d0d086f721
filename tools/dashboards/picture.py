"""Draws a dashboard like Grafana, from what a Prometheus has: for documents, and for machines without Grafana.

    python -m tools.dashboards.picture overview memory --prometheus http://127.0.0.1:9090 --seconds 600

Knows panels by Grafana's types alone. Needs matplotlib and Pillow.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from grafana_foundation_sdk.models.dashboard import Dashboard, GridPos, Panel, RowPanel
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from PIL import Image

from tools.dashboards.catalogue import dashboards, targets
from tools.dashboards.panels import BYTES, BYTES_A_SECOND, SECONDS, SHARE
from tools.dashboards.promql import filled

COLUMNS, WIDTH, UNIT_HEIGHT = 24, 14.0, 0.31  # Grafana's grid, and inches
LABELS = 1.2 / COLUMNS  # left of a panel, for those of its axis
POINTS = 120
PAPER, INK, FAINT = "#f4f5f7", "#24292e", "#7b8087"


class Line(NamedTuple):
    """A series over time."""

    legend: str
    times: list[float]
    values: list[float]
    labels: dict[str, str]


class Source(NamedTuple):
    """A Prometheus, and which time of it."""

    url: str
    end: float
    seconds: float
    scrape_seconds: float

    def ask(self, expression: str, legend: str) -> list[Line]:
        """Raises httpx.HTTPError."""
        step = max(self.seconds / POINTS, 1.0)
        rate_interval = max(step + self.scrape_seconds, 4 * self.scrape_seconds)  # as Grafana has it
        query: dict[str, str | float] = {
            "query": filled(expression, f"{rate_interval:.0f}s"),
            "start": self.end - self.seconds,
            "end": self.end,
            "step": step,
        }
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=query, timeout=30).raise_for_status()
        result = answer.json()["data"]["result"]
        return sorted((_line(series, legend) for series in result), key=lambda line: line.legend)


def draw(dashboard: Dashboard, source: Source) -> Figure:
    """All of its panels, where Grafana places them."""
    placed = [(panel, panel.grid_pos) for panel in dashboard.panels or () if panel.grid_pos]
    height = max(place.y + place.h for _, place in placed)
    figure = Figure(figsize=(WIDTH, (height + 1) * UNIT_HEIGHT), facecolor=PAPER)
    figure.text(0.008, 1 - 0.3 / (height + 1), dashboard.title or "", fontsize=13, color=INK, va="top", weight="bold")
    for panel, place in placed:
        box = _box(place, height)
        if isinstance(panel, RowPanel):
            figure.text(box[0], box[1] + 0.3 * box[3], panel.title or "", fontsize=10, color=INK)
        else:
            _panel(figure, panel, box, source)
    return figure


def _box(place: GridPos, height: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height as shares of the figure."""
    gap = 0.08
    return (
        (place.x + gap) / COLUMNS,
        (height - place.y - place.h + 2 * gap) / (height + 1),
        (place.w - 2 * gap) / COLUMNS,
        (place.h - 4 * gap) / (height + 1),
    )


def _panel(figure: Figure, panel: Panel, box: tuple[float, float, float, float], source: Source) -> None:
    left, bottom, width, height = box
    card = figure.add_axes(box, facecolor="white", xticks=[], yticks=[])
    card.spines[:].set_color("#dcdfe4")
    x, y = 0.09 / (width * WIDTH), 0.08 / (height * figure.get_figheight())
    card.text(x, 1 - y, panel.title or "", transform=card.transAxes, fontsize=8.5, color=INK, va="top", weight="bold")
    lines = [line for each in targets(panel) for line in source.ask(each.expr or "", each.legend_format or "")]
    unit = (panel.field_config.defaults.unit if panel.field_config else None) or ""
    if panel.type_val == "stat":
        _number(card, lines, unit, (panel.field_config and panel.field_config.defaults.no_value) or "-")
        return
    if panel.type_val == "table":
        _table(card, [line.labels for line in lines])
        return
    inside = (left + LABELS, bottom + 0.26 * height, width - LABELS - 0.3 / COLUMNS, 0.60 * height)
    axes = figure.add_axes(inside, facecolor="white")
    _lines(axes, lines, stacked=_is_stacked(panel))
    axes.set_xlim(source.end - source.seconds, source.end)
    _ticks(axes, unit)


def _number(card: Axes, lines: Sequence[Line], unit: str, nothing: str) -> None:
    legends = ", ".join(line.legend for line in lines)
    text = legends or (writer(unit)(lines[-1].values[-1]) if lines and lines[-1].values else nothing)
    card.text(0.5, 0.4, text, transform=card.transAxes, fontsize=17, color="#2f8a4d", ha="center", va="center")


def _table(card: Axes, rows: Sequence[dict[str, str]]) -> None:
    """One row as a column of labels, several as they are."""
    hidden = ("__name__", "instance", "job")
    shown = [{name: row[name] for name in sorted(row, key=lambda name: name != "strategy")} for row in rows]
    shown = [{name: value for name, value in row.items() if name not in hidden} for row in shown]
    if len(shown) == 1:
        cells = [[name, value] for name, value in shown[0].items()]
    else:
        cells = [list(row.values()) for row in shown]
    if not cells:
        return
    widths = [max(len(row[i]) for row in cells) + 3 for i in range(len(cells[0]))]
    heights = 0.78 / max(len(cells), 4)
    for i, row in enumerate(cells):
        for j, text in enumerate(row):
            x = 0.02 + sum(widths[:j]) / max(sum(widths), 90) * 0.98
            card.text(x, 0.78 - i * heights, text, transform=card.transAxes, fontsize=6.5, color=INK, va="top")


def _lines(axes: Axes, lines: Sequence[Line], *, stacked: bool) -> None:
    if stacked and lines:
        times = sorted({moment for line in lines for moment in line.times})
        known = [dict(zip(line.times, line.values, strict=True)) for line in lines]
        parts = [[values.get(moment, 0.0) for moment in times] for values in known]
        axes.stackplot(times, parts, labels=[line.legend for line in lines], alpha=0.75, linewidth=0)
    else:
        for line in lines:
            (drawn,) = axes.plot(line.times, line.values, label=line.legend, linewidth=1.3)
            axes.fill_between(line.times, line.values, alpha=0.07, color=drawn.get_color(), linewidth=0)
    axes.set_ylim(0, axes.get_ylim()[1] if any(value for line in lines for value in line.values) else 1)
    if lines:
        corner = (-LABELS / axes.get_position().width, -0.14)
        small = {"fontsize": 6.5, "handlelength": 1, "columnspacing": 1, "frameon": False}
        axes.legend(loc="upper left", bbox_to_anchor=corner, ncols=4, labelcolor=INK, **small)


def _ticks(axes: Axes, unit: str) -> None:
    """Few, and round in their unit: bytes in powers of two."""
    write = writer(unit)
    axes.locator_params(nbins=4)
    if unit in (BYTES, BYTES_A_SECOND):
        axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(axes.get_ylim()[1] / 4))))
    axes.yaxis.set_major_formatter(lambda value, _: write(value))
    axes.xaxis.set_major_formatter(lambda moment, _: time.strftime("%H:%M:%S", time.gmtime(moment)))
    axes.tick_params(labelsize=6.5, length=0, colors=FAINT)
    axes.grid(color="#e8eaed", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def writer(unit: str) -> Callable[[float], str]:
    """How values of one of Grafana's units are written."""
    prefixed = {SECONDS: (1.0, "s"), BYTES: (1024.0, "B"), BYTES_A_SECOND: (1024.0, "B/s")}
    endings = {"reqps": " req/s", "ops": " ops/s", "short": ""}

    def write(value: float) -> str:
        if unit == SHARE:
            return f"{100 * value:.3g}%"
        if unit == SECONDS:
            return f"{value:.3g} s" if abs(value) >= 1 or not value else f"{1000 * value:.3g} ms"
        base, ending = prefixed.get(unit, (1000.0, endings.get(unit, " " + unit.partition(":")[2])))
        size = 0
        while abs(value) >= base and size < 4:
            value, size = value / base, size + 1
        prefix = ["", "k", "M", "G", "T"][size] if base == 1000 else ["", "Ki", "Mi", "Gi", "Ti"][size]
        return f"{value:.3g}{' ' + prefix + ending if base == 1024 else prefix + ending}"

    return write


def _line(series: dict[str, Any], legend: str) -> Line:
    named = re.sub(r"\{\{(\w+)\}\}", lambda label: str(series["metric"].get(label[1], "")), legend)
    points = [(float(moment), float(value)) for moment, value in series["values"] if value != "NaN"]
    return Line(named, [moment for moment, _ in points], [value for _, value in points], series["metric"])


def _is_stacked(panel: Panel) -> bool:
    custom = panel.field_config.defaults.custom if panel.field_config else None
    stacking = getattr(custom, "stacking", None)
    return stacking is not None and stacking.mode == "normal"


def save(figure: Figure, file: Path) -> None:
    """A PNG of few colours, a third as large."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(256).save(file, optimize=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dashboards.picture")
    known = {(each.uid or "").partition("-")[2]: each for each in dashboards()}
    parser.add_argument("dashboards", nargs="+", choices=known, metavar="DASHBOARD", help=", ".join(known))
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--seconds", type=float, default=3600.0, help="until now")
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="how often Prometheus reads the metrics")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the files, dashboard-NAME.png")
    wanted = parser.parse_args(argv)
    source = Source(wanted.prometheus, time.time(), wanted.seconds, wanted.scrape_seconds)
    wanted.folder.mkdir(parents=True, exist_ok=True)
    for name in wanted.dashboards:
        save(draw(known[name], source), wanted.folder / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
