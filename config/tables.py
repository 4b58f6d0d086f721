"""Formats numbers, and rows as a table in GitHub's Markdown, as the reports of commands print them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def format_table(names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table.

    `names` are the headings of the first columns, whose cells are texts; `numbers` are those of the others, which are
    aligned at the right.
    """
    table = Table(*names, box=box.MARKDOWN)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    printed = io.StringIO()
    Console(file=printed, width=10_000, force_terminal=False, color_system=None, markup=False).print(table)
    return "\n".join(line.strip() for line in printed.getvalue().strip().splitlines())


def format_number(value: float) -> str:
    """Return a number with three digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
