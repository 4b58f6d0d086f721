"""The figures of tools.bench.compression, as tables and as a plot. Needs matplotlib for the plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNNING, SEEN, UNSEEN = "running text", "question seen", "question not seen"
EXACT, CONTROL, SAME_TOKENS = "exact", "random", "random, same in all heads"
CONTROLS = {CONTROL: "0.85", SAME_TOKENS: "moccasin"}  # the colours of their bands
MARKERS = "osD^vP*X<>"
# 97.5 % points of Student's distribution, by degrees of freedom
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


class Measurement(NamedTuple):
    """The figures of one scorer with one budget, on the documents of one seed."""

    scorer: str
    share: float  # of the keys that stay
    task: str
    seed: int
    perplexity: float  # of running text
    text_kl: float  # mean KL divergence from exact caching, nats: running text
    records_kl: float  # and records
    right: int  # answers
    asked: int


Figure = Callable[[Measurement], float]


def recall(measurement: Measurement) -> float:
    """Return the share of right answers, in percent."""
    return 100 * measurement.right / measurement.asked


# What the columns show: a heading, the task, the figure, and its format.
COLUMNS: Sequence[tuple[str, str, Figure, str]] = (
    ("perplexity of stories", RUNNING, lambda m: m.perplexity, ".3f"),
    ("KL of stories", RUNNING, lambda m: m.text_kl, ".3f"),
    ("KL of records", RUNNING, lambda m: m.records_kl, ".3f"),
    ("recall, %", RUNNING, recall, ".0f"),
    ("recall, question seen, %", SEEN, recall, ".0f"),
    ("recall, question not seen, %", UNSEEN, recall, ".0f"),
)


class Estimate(NamedTuple):
    """A mean over seeds, and half of its 95 % interval."""

    mean: float
    margin: float


def estimate(measurements: Sequence[Measurement], scorer: str, share: float, task: str, figure: Figure) -> Estimate:
    """Return the mean of a figure over the seeds."""
    values = [figure(m) for m in measurements if (m.scorer, m.share, m.task) == (scorer, share, task)]
    n = len(values)
    margin = STUDENT.get(n - 1, 1.96) * stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean(values), margin)


def list_rows(measurements: Sequence[Measurement]) -> list[tuple[str, float]]:
    """Return the scorers with their shares of keys: exact caching, then by share, the controls last."""
    rows = {(m.scorer, m.share) for m in measurements}
    return sorted(rows, key=lambda row: (-row[1], row[0] in CONTROLS, row[0]))


def as_table(measurements: Sequence[Measurement]) -> str:
    """Return the estimates as a table in Markdown."""
    lines = [
        f"| keys | scorer | {' | '.join(heading for heading, *_ in COLUMNS)} |",
        f"|---:|---|{'---:|' * len(COLUMNS)}",
    ]
    for scorer, share in list_rows(measurements):
        cells = []
        for _, task, figure, form in COLUMNS:
            found = estimate(measurements, scorer, share, task, figure)
            cells.append(f"{found.mean:{form}} ± {found.margin:{form}}")
        lines.append(f"| {share:.1%} | `{scorer}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def save_plot(measurements: Sequence[Measurement], file: Path) -> None:
    """Plot KL divergence and recall by the share of keys that stays; each control has a band, its 95 % interval."""
    from matplotlib import figure as matplotlib_figure

    figure = matplotlib_figure.Figure(figsize=(13, 5), layout="constrained")
    shown = [COLUMNS[2], COLUMNS[4], COLUMNS[5]]
    for axes, (heading, task, of, _) in zip(figure.subplots(1, len(shown)), shown, strict=True):
        _plot_figure(axes, measurements, heading, task, of)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(file, dpi=130)


def _plot_figure(axes: Axes, measurements: Sequence[Measurement], heading: str, task: str, of: Figure) -> None:
    found = {m.scorer for m in measurements}
    scorers = sorted(found - {EXACT, *CONTROLS})
    shares = sorted({m.share for m in measurements if m.scorer != EXACT})
    for control in CONTROLS.keys() & found:
        estimates = [estimate(measurements, control, share, task, of) for share in shares]
        low, high = ([each.mean + sign * each.margin for each in estimates] for sign in (-1, 1))
        axes.fill_between(shares, low, high, color=CONTROLS[control], alpha=0.7, label=f"{control}, 95 %")
    for marker, scorer in zip(MARKERS, scorers, strict=False):
        means = [estimate(measurements, scorer, share, task, of).mean for share in shares]
        axes.plot(shares, means, marker=marker, label=scorer, markersize=5, linewidth=1.1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"{share:.1%}" for share in shares])
    axes.set_xlabel("keys that stay")
    axes.set_ylabel(heading)
    axes.grid(alpha=0.3)
