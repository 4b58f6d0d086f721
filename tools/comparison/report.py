"""Writes the results of a comparison as an HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tools.comparison.fidelity import StrategyFidelity
from tools.comparison.figures import FIGURES, Figure, Summary
from tools.comparison.plots import COLUMN_INCHES, draw_fidelity, draw_growth
from tools.comparison.results import Comparison

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MISSING = "-"
PIXELS_PER_INCH = 96
MIN_PLOT_INCHES = 6.5  # narrower pages scroll plots sideways, as small text could not be read


@dataclass(frozen=True)
class ValueCell:
    """A cell of a table: a value with the range of its rounds, and whether it is the best of its column."""

    value: str
    range: str = ""
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    """A row of a table of figures: a strategy."""

    name: str
    cells: Sequence[ValueCell]


@dataclass(frozen=True)
class FigureTable:
    """A table of one figure: a row for each strategy, a column for each load."""

    title: str
    unit: str
    rows: Sequence[TableRow]


def make_page(results: Comparison) -> str:
    """Return the report as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    plan, record = results.plan, results.record
    total = len(list(plan.cells()))
    first = next(iter(record.results.values()), None)
    width = COLUMN_INCHES * len(plan.prompt_lengths)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=dict(results.facts)["model"],
        date=results.date.date().isoformat(),
        missing=total - len(record.results),
        total=total,
        max_kl=f"{results.max_kl:g}",
        advice=results.advice(),
        has_fidelity=results.has_fidelity,
        fidelity_plot=Markup(draw_fidelity(results)) if results.has_fidelity else "",
        growth_plot=Markup(draw_growth(results)),
        plot_width=f"{width * PIXELS_PER_INCH:.0f}px",
        plot_min_width=f"{min(width, MIN_PLOT_INCHES) * PIXELS_PER_INCH:.0f}px",
        fidelity_errors=list(_iter_fidelity_errors(results)),
        fidelity=list(_iter_fidelity_rows(results)),
        lengths=plan.prompt_lengths,
        rounds=plan.rounds,
        loads=plan.loads,
        tables=[make_table(results, figure) for figure in FIGURES],
        errors=list(_iter_errors(results)),
        facts=results.facts,
        commands=results.commands,
        options=[(name, json.dumps(each)) for name, each in results.options.items()],
        queries=[(name, each.query) for name, each in first.figures.items()] if first else [],
    )


# ---------------------------------------------------------------- figures
def make_table(results: Comparison, figure: Figure) -> FigureTable:
    """Return the table of a figure; the best values of each column are marked, unless all are alike."""
    columns = []
    for load in results.plan.loads:
        summaries = [results.summarize(figure.name, load, name) for name in results.plan.strategies]
        shown = [_format_value(each) for each in summaries]
        values = [each.value for each in summaries if each is not None]
        best = (max if figure.higher_is_better else min)(values, default=None)
        alike = len(set(shown)) == 1
        columns.append(
            [
                ValueCell(text, _format_range(each), not alike and each is not None and each.value == best)
                for text, each in zip(shown, summaries, strict=True)
            ]
        )
    rows = [TableRow(name, cells) for name, *cells in zip(results.plan.strategies, *columns, strict=True)]
    return FigureTable(figure.title, figure.unit, rows)


def format_number(value: float) -> str:
    """Return a number with three digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _format_value(summary: Summary | None) -> str:
    return MISSING if summary is None else format_number(summary.value)


def _format_range(summary: Summary | None) -> str:
    if summary is None or summary.low == summary.high:
        return ""
    return f"{format_number(summary.low)} to {format_number(summary.high)}"


def _iter_errors(results: Comparison) -> Iterator[str]:
    for load in results.plan.loads:
        for name in results.plan.strategies:
            for message, number in results.count_errors(load, name).items():
                yield f"{name}, {load}: {number} times: {message}"


# ---------------------------------------------------------------- fidelity
@dataclass(frozen=True)
class FidelityRow:
    """A row of the table of fidelity: a strategy, with a text and a smaller one for each prompt length."""

    name: str
    cells: Sequence[tuple[str, str]]


def _iter_fidelity_rows(results: Comparison) -> Iterator[FidelityRow]:
    by_length = [results.fidelity(length) for length in results.plan.prompt_lengths]
    for name in results.plan.strategies:
        is_exact = results.record.exact.get(name, False)
        yield FidelityRow(name, [_format_fidelity(each.get(name), is_exact=is_exact) for each in by_length])


def _format_fidelity(fidelity: StrategyFidelity | None, *, is_exact: bool) -> tuple[str, str]:
    if fidelity is None:
        return "exact" if is_exact else MISSING, ""
    return "exact" if is_exact else f"{fidelity.kl:.2g}", f"{fidelity.same_top:.1%}"


def _iter_fidelity_errors(results: Comparison) -> Iterator[str]:
    for length, report in results.record.fidelity.items():
        if "error" in report:
            yield f"fidelity at {length} tokens: {report['error']}"
