"""Draws fidelity against memory and speed as SVG, to be put into the report. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from tools.comparison.plan import Load
from tools.comparison.results import Comparison

# Okabe and Ito's colours, which people with colour blindness tell apart; markers tell strategies apart without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C7A00", "#7F7F7F")
MARKERS = "osD^vP*Xh"  # one more than colours, so that no two of many strategies look alike
INK = "#808081"  # of axes and text; replaced by the page's own colour, which may be light or dark
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvmux",  # the same ids for the same plot
    "font.size": 9.0,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
LEAST_KL = 1e-6  # nats, at which exact strategies are drawn on a logarithmic axis
COLUMN_INCHES, ROW_INCHES = 3.6, 3.0


def draw_fidelity(results: Comparison) -> str:
    """Draw fidelity against memory (above) and speed (below), by prompt length, at the largest batch."""
    lengths, batch = results.plan.prompt_lengths, max(results.plan.batches)
    loads = [Load(length, batch) for length in lengths]

    def draw(axes: Sequence[Sequence[Axes]]) -> None:
        for column, load in enumerate(loads):
            for row, figure in zip(axes, ("kv_memory", "tokens_per_second"), strict=True):
                _scatter_fidelity(row[column], results, load, figure)
            axes[0][column].set_title(str(load), fontsize=9)
            axes[0][column].set_xlabel("KV memory, MiB")
            axes[1][column].set_xlabel("tokens/s")
        for row in axes:
            row[0].set_ylabel("KL from exact, nats per token")

    return _draw_grid(len(loads), draw)


def _scatter_fidelity(axes: Axes, results: Comparison, load: Load, figure: str) -> None:
    fidelity = results.fidelity.get(load.prompt_tokens, {})
    for i, name in enumerate(results.plan.strategies):
        summary = results.summarize(figure, load, name)
        if summary is None or name not in fidelity:
            continue
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS[i % len(COLOURS)], "label": name}
        kl = max(fidelity[name].kl, LEAST_KL)
        spread = [[summary.value - summary.low], [summary.high - summary.value]]
        axes.errorbar([summary.value], [kl], xerr=spread, linestyle="", markersize=7, capsize=2, **style)
    axes.set_yscale("log")
    axes.set_ylim(bottom=LEAST_KL / 2)
    axes.set_xlim(left=0)


def _draw_grid(columns: int, draw: Callable[[Sequence[Sequence[Axes]]], None]) -> str:
    """Return two rows of plots with one legend, as an SVG element without background."""
    with mpl.rc_context(STYLE):
        drawing = Drawing(figsize=(COLUMN_INCHES * columns + 0.6, 2 * ROW_INCHES + 0.6), layout="constrained")
        axes = drawing.subplots(2, columns, squeeze=False)
        draw(axes.tolist())
        entries: dict[str, Any] = {}  # a strategy may have no value in some plots
        for each in axes.flat:
            each.set_facecolor("none")
            each.grid(alpha=0.25)
            handles, labels = each.get_legend_handles_labels()
            entries |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
        ncols = max(1, min(4, len(entries)))
        drawing.legend([*entries.values()], [*entries], loc="outside lower center", ncols=ncols, frameon=False)
        drawing.patch.set_alpha(0.0)
        text = io.StringIO()
        drawing.savefig(text, format="svg", metadata={"Date": None})
    _, tag, rest = text.getvalue().partition("<svg")
    return (tag + rest).replace(INK, "currentColor")
