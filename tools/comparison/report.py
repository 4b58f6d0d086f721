"""Writes the results of a comparison as an HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from config.tables import format_number
from tools.comparison.figures import FIGURES, Figure, Summary
from tools.comparison.plots import draw_fidelity
from tools.comparison.results import Comparison

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MISSING = "-"
FIDELITY_NOTE = (
    "KL divergence from exact caching (nats per token), and tokens with the same likeliest token, averaged over a "
    "whole text of the prompt's and the answer's length; answers alone may be further away"
)


class ReportSetup(NamedTuple):
    """How a comparison was measured, to be shown."""

    date: str
    facts: Sequence[tuple[str, str]]  # model, machine, versions and others
    command: str
    options: Mapping[str, Mapping[str, Any]]  # of each strategy


class ValueCell(NamedTuple):
    """A cell of a table: a value with a smaller text below it, and whether it is the best of its column."""

    value: str
    small: str = ""
    best: bool = False


class Table(NamedTuple):
    """A table with a row for each strategy."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[ValueCell]]]


def make_page(results: Comparison, setup: ReportSetup) -> str:
    """Return the report as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    total = len(list(results.plan.cells()))
    has_fidelity = any(results.fidelity.values())
    tables = [make_fidelity_table(results)] if has_fidelity else []
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        setup=setup,
        model=dict(setup.facts)["model"],
        missing=total - len(results.cells),
        total=total,
        max_kl=f"{results.max_kl:g}",
        advice=results.advice(),
        fidelity_plot=Markup(draw_fidelity(results)) if has_fidelity else "",
        fidelity_errors=[f"fidelity at {n} tokens: {text}" for n, text in results.fidelity_errors.items()],
        rounds=results.plan.rounds,
        tables=[*tables, *(make_table(results, figure) for figure in FIGURES)],
        errors=list(_iter_errors(results)),
        failures=results.failures,
        options=[(name, json.dumps(each)) for name, each in setup.options.items()],
        queries=[(figure.title, figure.query) for figure in FIGURES],
    )


def make_table(results: Comparison, figure: Figure) -> Table:
    """Return the table of a figure; the best values of each column are marked, unless all are alike."""
    columns = []
    for load in results.plan.loads:
        summaries = [results.summarize(figure.name, load, name) for name in results.plan.strategies]
        shown = [MISSING if each is None else format_number(each.value) for each in summaries]
        values = [each.value for each in summaries if each is not None]
        best = (max if figure.higher_is_better else min)(values, default=None)
        alike = len(set(shown)) == 1
        columns.append(
            [
                ValueCell(text, _format_range(each), not alike and each is not None and each.value == best)
                for text, each in zip(shown, summaries, strict=True)
            ]
        )
    rows = list(zip(results.plan.strategies, zip(*columns, strict=True), strict=True))
    return Table(figure.title, figure.unit, [str(load) for load in results.plan.loads], rows)


def make_fidelity_table(results: Comparison) -> Table:
    """Return the table of fidelity, with a column for each prompt length."""
    lengths = results.plan.prompt_lengths
    rows = [(name, [_format_fidelity(results, name, length) for length in lengths]) for name in results.plan.strategies]
    return Table("Fidelity", FIDELITY_NOTE, [f"{length:,} tokens" for length in lengths], rows)


def _format_fidelity(results: Comparison, name: str, length: int) -> ValueCell:
    found = results.fidelity.get(length, {}).get(name)
    exact = "exact" if results.exact.get(name, False) else ""
    return (
        ValueCell(exact or MISSING) if found is None else ValueCell(exact or f"{found.kl:.2g}", f"{found.same_top:.1%}")
    )


def _format_range(summary: Summary | None) -> str:
    if summary is None or summary.low == summary.high:
        return ""
    return f"{format_number(summary.low)} to {format_number(summary.high)}"


def _iter_errors(results: Comparison) -> Iterator[str]:
    for load in results.plan.loads:
        for name in results.plan.strategies:
            for message, number in results.count_errors(load, name).items():
                yield f"{name}, {load}: {number} times: {message}"
