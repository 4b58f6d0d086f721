"""Plots an evaluation: recall by distance, and agreement with exact caching by memory. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import SettingsError
from server.evaluation.report import EvaluationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".pdf")
MARKERS = "osD^vP*X"  # markers tell strategies apart, as lines may coincide and colours look alike to some


def check_plot(file: Path) -> None:
    """Raise SettingsError if the file's ending is not .png, .svg or .pdf, or if matplotlib is not installed."""
    if file.suffix.lower() not in ENDINGS:
        raise SettingsError(f"--plot {file}: the name should end in {', '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib: pip install 'kvmux[evaluate]'")


def save_plot(report: EvaluationReport, file: Path) -> None:
    """Write the plot as PNG, SVG or PDF, by the file's ending. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    recall, memory = figure.subplots(1, 2)
    _plot_recall(recall, report)
    _plot_memory(memory, report)
    figure.suptitle(f"{report.model}, {report.dtype}, documents of {report.length:,} tokens", fontsize=10)
    figure.savefig(file, dpi=150)


def _plot_recall(axes: Axes, report: EvaluationReport) -> None:
    for marker, result in zip(MARKERS * len(report.results), report.results, strict=False):
        recalls = [(span.farthest, *result.records.recall(*span)) for span in report.distance_ranges]
        distances = [distance for distance, _, total in recalls if total]
        shares = [100 * right / total for _, right, total in recalls if total]
        axes.plot(distances, shares, marker=marker, label=result.name, markersize=5, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [span.farthest for span in report.distance_ranges], [f"{span.farthest:,}" for span in report.distance_ranges]
    )
    axes.set_ylim(-3, 103)
    axes.set_xlabel("distance of the answer, up to N tokens back")
    axes.set_ylabel("recall, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _plot_memory(axes: Axes, report: EvaluationReport) -> None:
    for marker, result in zip(MARKERS * len(report.results), report.results, strict=False):
        axes.plot(result.kv_bytes / 1024, 100 * result.records.agreement, marker=marker, linestyle="")
    axes.set_xlim(left=0)
    axes.set_xlabel("KV memory of a document, KiB")
    axes.set_ylabel("same top-1 token as exact caching, records, %")
    axes.grid(alpha=0.3)
