"""`python -m tools.bench.growth`: measures how the engine's costs grow with load, in this process.

The time of a decode step under each strategy by the context's length and by the number of sequences, each beside the
bound that memory bandwidth sets; and the number of function calls by the number of waiting requests and of cached
blocks, which should be constant. Prompts are not computed, and times leave out scheduling, sampling and compaction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console

from config.errors import SettingsError
from config.settings import Weights
from tools.bench.growth.counts import measure_by_blocks, measure_by_waiting
from tools.bench.growth.plot import GrowthPoint, draw
from tools.bench.growth.times import measure_by_context, measure_by_sequences

PARTS = ("context", "sequences", "waiting", "blocks")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.growth", description=__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add("--max-size", type=int, default=sys.maxsize, help="largest context length, number of requests and of blocks")
    add("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one); only times depend on it")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    add("--kv-memory", default="4GiB", help="as for `kvmux serve`; sizes without room are left out (default: 4GiB)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    add("--plot", type=Path, metavar="FILE", help="plot the figures to this .png or .svg; needs kvmux[evaluate]")
    options = parser.parse_args(arguments)
    settings = {name: getattr(options, name) for name in ("model", "dtype", "weights", "kv_memory")}
    measures: dict[str, Callable[[int], Iterator[GrowthPoint]]] = {
        "context": partial(measure_by_context, settings),
        "sequences": partial(measure_by_sequences, settings),
        "waiting": measure_by_waiting,
        "blocks": measure_by_blocks,
    }
    points = []
    with Console(stderr=True).status("starting") as status:
        try:
            for part in options.part:
                for point in measures[part](options.max_size):
                    status.update(f"{point.part} {point.size:,} {point.strategy}".removesuffix(" None"))
                    points.append(point)
        except SettingsError as error:
            parser.error(str(error))
    print(as_text(points))
    if options.json:
        options.json.write_text(json.dumps([point._asdict() for point in points], indent=2) + "\n")
    if options.plot:
        draw(points, options.plot)
    return 0


# -------------------------------------------------------------------- report
def as_text(points: Sequence[GrowthPoint]) -> str:
    """Return the points as Markdown, one table for each part."""
    parts = dict.fromkeys(point.part for point in points)
    return "\n\n".join(_format_table(part, [point for point in points if point.part == part]) for part in parts)


def _format_table(part: str, points: Sequence[GrowthPoint]) -> str:
    """Return a table with a column for each metric, or for each strategy if the part compares strategies."""
    columns = list(dict.fromkeys(point.label for point in points))
    title = f"{part}: {points[0].metric} (the machine allows)" if points[0].strategy else part
    lines = ["| " + " | ".join([title, *columns]) + " |", "|" + "---:|" * (1 + len(columns))]
    for size in dict.fromkeys(point.size for point in points):
        cells = {point.label: _format_cell(point) for point in points if point.size == size}
        lines.append("| " + " | ".join([f"{size:,}", *(cells.get(column, "–") for column in columns)]) + " |")
    return "\n".join(lines)


def _format_cell(point: GrowthPoint) -> str:
    return f"{point.value:,.4g}" + (f" ({point.bound:,.4g})" if point.bound is not None else "")


if __name__ == "__main__":
    sys.exit(main())
