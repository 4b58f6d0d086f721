"""Plots the samples of `python -m tools.bench compression`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.runner import Interval, Sample, estimate_median

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = ("KL of records", "recall, question seen", "recall, question not seen")
CONTROLS = {"random": "0.85", "random, same in all heads": "moccasin"}  # the colours of their bands
MARKERS = "osD^vP*X<>"


def draw(samples: Sequence[Sample], file: Path) -> None:
    """Plot KL divergence and recall by the share of keys that stays; each control has a band, its 95 % interval."""
    from matplotlib import figure as matplotlib_figure  # optional dependency

    figure = matplotlib_figure.Figure(figsize=(13, 5), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
        _plot_row(axes, what, [each for each in samples if each.reading.row.what == what])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(file, dpi=130)


def _plot_row(axes: Axes, what: str, samples: Sequence[Sample]) -> None:
    by_scorer: dict[str, dict[float, Interval]] = {}
    for variant in dict.fromkeys(each.variant for each in samples):
        share, scorer = variant.split("%, ")
        values = [each.reading.value or 0.0 for each in samples if each.variant == variant]
        by_scorer.setdefault(scorer, {})[float(share) / 100] = estimate_median(values)
    by_scorer.pop("exact", None)
    for control in CONTROLS.keys() & by_scorer:
        found = dict(sorted(by_scorer.pop(control).items()))
        low, high = [each.low for each in found.values()], [each.high for each in found.values()]
        axes.fill_between([*found], low, high, color=CONTROLS[control], alpha=0.7, label=f"{control}, 95 %")
    for marker, (scorer, found) in zip(MARKERS, by_scorer.items(), strict=False):
        medians = [each.median for each in found.values()]
        axes.plot([*found], medians, marker=marker, label=scorer, markersize=5, linewidth=1.1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys that stay")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
