"""Draws the plots of a comparison as SVG, to be put into the report. Needs matplotlib."""

from __future__ import annotations

import io
import re
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

    return _draw("fidelity", 2, len(loads), draw)


def _scatter_fidelity(axes: Axes, results: Comparison, load: Load, figure: str) -> None:
    fidelity = results.fidelity(load.prompt_tokens)
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


def draw_growth(results: Comparison) -> str:
    """Draw speed (above) and time to the first token (below) against the batch size, by prompt length."""
    lengths, batches = results.plan.prompt_lengths, results.plan.batches

    def draw(axes: Sequence[Sequence[Axes]]) -> None:
        for column, length in enumerate(lengths):
            for row, figure in zip(axes, ("tokens_per_second", "ttft_p50"), strict=True):
                _plot_batches(row[column], results, length, figure)
            axes[0][column].set_title(f"prompts of {length:,} tokens", fontsize=9)
            axes[1][column].set_xlabel("requests at once")
            axes[0][column].set_xticks(batches, map(str, batches))
        axes[0][0].set_ylabel("tokens/s")
        axes[1][0].set_ylabel("time to the first token, ms")

    return _draw("growth", 2, len(lengths), draw)


def _plot_batches(axes: Axes, results: Comparison, length: int, figure: str) -> None:
    for i, name in enumerate(results.plan.strategies):
        points = [(batch, results.summarize(figure, Load(length, batch), name)) for batch in results.plan.batches]
        measured = [(batch, each.value) for batch, each in points if each is not None]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS[i % len(COLOURS)], "label": name}
        axes.plot([x for x, _ in measured], [y for _, y in measured], linewidth=1.2, markersize=5, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(results.plan.batches, map(str, results.plan.batches))
    axes.set_ylim(bottom=0)


def _draw(name: str, rows: int, columns: int, draw: Callable[[Sequence[Sequence[Axes]]], None]) -> str:
    """Return a grid of plots with one legend, as an SVG element without background; its ids begin with `name`."""
    with mpl.rc_context(STYLE):
        drawing = Drawing(figsize=(COLUMN_INCHES * columns + 0.6, ROW_INCHES * rows + 0.6), layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False)
        draw(axes.tolist())
        entries: dict[str, Any] = {}  # a strategy may have no value in some plots
        for each in axes.flat:
            each.set_facecolor("none")
            each.grid(alpha=0.25)
            handles, labels = each.get_legend_handles_labels()
            entries |= {str(label): handle for label, handle in zip(labels, handles, strict=True)}
        columns_of_legend = max(1, min(4, len(entries)))
        drawing.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=columns_of_legend, frameon=False
        )
        drawing.patch.set_alpha(0.0)
        text = io.StringIO()
        drawing.savefig(text, format="svg", metadata={"Date": None})
    _, tag, rest = text.getvalue().partition("<svg")
    own_ids = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag + rest)
    return own_ids.replace(INK, "currentColor")
