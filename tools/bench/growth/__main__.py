"""`python -m tools.bench.growth`: measures how the engine's costs grow with load, in this process.

The time of a decode step under each built-in strategy, by the context of one stream and by the number of streams, each
beside the least time that this machine allows: that of reading weights, keys and values once at the speed of the
memory, measured just before, or that of the products. The strategies take turns in several rounds; the medians are
reported. And the number of function calls by the number of waiting requests and of cached blocks, which should be
constant.

Prompts are not computed: memory is filled with random numbers, and the strategies are given prompts of random tokens as
if they had been computed, which they compact and evict as usual. Times leave out scheduling, sampling and compaction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import get_args

from config.errors import SettingsError
from config.settings import Weights
from tools.bench.growth.counts import measure_by_blocks, measure_by_waiting
from tools.bench.growth.plot import draw
from tools.bench.growth.points import GrowthPoint, as_json
from tools.bench.growth.times import CONTEXTS, STREAMS, GrowthOptions, measure_by_context, measure_by_streams
from tools.bench.table.models import LLAMA, QWEN, cache_folder, make_model
from tools.bench.table.report import format_number
from tools.status_line import status_line

PARTS = ("context", "streams", "waiting", "blocks")
TIMES = {"context": measure_by_context, "streams": measure_by_streams}  # of each model
COUNTS = {"waiting": measure_by_waiting, "blocks": measure_by_blocks}  # of none
SMALL = replace(LLAMA, name=f"{LLAMA.name}-32k", max_positions=QWEN.max_positions)  # for as long contexts
SHAPES = {shape.name: shape for shape in (QWEN, SMALL)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    date, points = datetime.now().astimezone(), list[GrowthPoint]()
    with status_line() as show_status:
        try:
            points += chain.from_iterable(measure_model(name, options, show_status) for name in options.model)
        except SettingsError as error:
            print(f"python -m tools.bench.growth: error: {error}", file=sys.stderr)
            return 2
        for part in (part for part in COUNTS if part in options.part):
            show_status(part)
            points += COUNTS[part](options.max_size)
    print(as_text(points))
    if options.json:
        options.json.write_text(json.dumps(as_json(points, date), indent=2) + "\n")
    if options.plot:
        draw(points, options.plot)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.growth", description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add(
        "--model",
        nargs="+",
        default=list(SHAPES),
        help=f"{' and '.join(SHAPES)}: models of these shapes with random weights (default: both); others as for "
        "`kvmux serve`",
    )
    add(
        "--strategies",
        nargs="+",
        default=[],
        help="as for `kvmux evaluate` (default: every built-in one, those with options as in long_contexts.toml)",
    )
    add("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens of one stream, up to the model's context")
    add("--streams", nargs="+", type=int, default=STREAMS, help="numbers of streams that are decoded together")
    add("--stream-context", type=int, default=512, help="tokens of each of several streams (default: 512)")
    add("--rounds", type=int, default=3, help="rounds in which every strategy has a turn (default: 3)")
    add("--max-size", type=int, default=sys.maxsize, help="largest number of requests and of blocks")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    add("--kv-memory", default="8GiB", help="as for `kvmux serve`; sizes without room are left out (default: 8GiB)")
    add("--models", type=Path, default=cache_folder(), help="folder of the models (default: in the user's cache)")
    add("--json", type=Path, metavar="FILE", help="write the figures of all rounds to this file as JSON")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot the figures to this .png or .svg, those of further models to FILE-MODEL; needs kvmux[evaluate]",
    )
    options = parser.parse_args(arguments)
    if min(options.rounds, options.stream_context, *options.contexts, *options.streams) < 1:
        parser.error("--rounds, --contexts, --streams and --stream-context should be at least 1")
    return options


def measure_model(name: str, options: argparse.Namespace, show_status: Callable[[str], None]) -> Iterator[GrowthPoint]:
    """Yield the times of a model. Raises SettingsError."""
    parts = [part for part in TIMES if part in options.part]
    if not parts:
        return
    model = make_model(SHAPES[name], options.models, show_status) if name in SHAPES else name
    settings = {"model": str(model)} | {each: getattr(options, each) for each in ("dtype", "weights", "kv_memory")}
    wanted = GrowthOptions(
        Path(name).name,
        settings,
        options.strategies,
        sorted(options.contexts),
        sorted(options.streams),
        options.stream_context,
        options.rounds,
    )
    for part in parts:
        yield from TIMES[part](wanted, show_status)


# -------------------------------------------------------------------- report
def as_text(points: Sequence[GrowthPoint]) -> str:
    """Return the points as Markdown, one table for each part of each model."""
    tables = dict.fromkeys((point.model, point.part) for point in points)
    return "\n\n".join(
        _format_table(part, [point for point in points if (point.model, point.part) == (model, part)])
        for model, part in tables
    )


def _format_table(part: str, points: Sequence[GrowthPoint]) -> str:
    """Return a table with a column for each metric, or for each strategy if the part compares strategies."""
    columns = list(dict.fromkeys(point.label for point in points))
    first = points[0]
    title = f"{first.model}, {part}: {first.metric} (the machine allows, share)" if first.strategy else part
    lines = ["| " + " | ".join([title, *columns]) + " |", "|" + "---:|" * (1 + len(columns))]
    for size in dict.fromkeys(point.size for point in points):
        cells = {point.label: _format_cell(point) for point in points if point.size == size}
        lines.append("| " + " | ".join([f"{size:,}", *(cells.get(column, "–") for column in columns)]) + " |")
    return "\n".join(lines)


def _format_cell(point: GrowthPoint) -> str:
    """Return the value, and of a time also the limit and which share of the time it is."""
    if point.limit is None:
        return f"{point.value:,.4g}"
    return f"{format_number(point.value)} ({format_number(point.limit)}, {point.limit / point.value:.0%})"


if __name__ == "__main__":
    sys.exit(main())
