"""`make bench`: every figure that has a goal, and what it is compared with, measured here.

Wires models, rows and the report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import get_args

from rich.console import Console

from server.profiling.running import RunError, sigterm_as_ctrl_c
from tools.bench.table.documents import BENCHMARKS, TABLES, update_performance_doc, update_section
from tools.bench.table.goals import ROWS, Group
from tools.bench.table.models import SHAPES, cache_folder
from tools.bench.table.report import BenchmarkReport, as_json, as_text
from tools.bench.table.runs import Effort, measure_rows

DESCRIPTION = """\
Starts `kvmux serve` once for each model and format of weights, loads it over HTTP, and compares the figures with
the goal, what other servers reached, and what this machine allows in the same minute. transformers is measured beside
it, in a process of its own. Models of real shapes with random weights are made first, and kept. A run that other
processes disturb is repeated, and marked if that does not help."""

FAILED, INTERRUPTED = 2, 130  # exit statuses; the second as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", choices=get_args(Group), default=get_args(Group), help="only these (default: all)")
    add("--model", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="only these (default: all)")
    add("--rounds", type=int, default=3, help="of each workload (default: 3)")
    add("--attempts", type=int, default=3, help="at a workload that others disturb (default: 3)")
    add("--models", type=Path, default=cache_folder(), help="folder of the models (default: in the user's cache)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--docs", type=Path, metavar="FOLDER", help="measure all that the documents there show, and write it into them")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.attempts) < 1:
        parser.error("--rounds and --attempts: from 1 on")
    rows = [row for row in ROWS if row.group in options.rows and row.shape.name in options.model]
    if not rows:
        parser.error("of these models no such row is measured; see --rows and --model")
    if options.docs and len(rows) < len(ROWS):
        parser.error("--docs: the documents show all rows; leave --rows and --model out")
    date = datetime.now().astimezone()
    with sigterm_as_ctrl_c(), Console(stderr=True).status("starting") as status:
        try:
            effort = Effort(options.rounds, options.attempts, options.models)
            results = measure_rows(rows, effort, status.update)
            report = BenchmarkReport(date, sorted(results, key=lambda each: rows.index(each.row)))
            if options.docs:
                update_section(options.docs / BENCHMARKS, TABLES, as_text(report))
                update_performance_doc(options.docs, options.models, status.update)
        except (RunError, OSError) as error:
            print(f"make bench: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:  # SIGTERM, too; by now all that was started has ended
            return INTERRUPTED
    print(as_text(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
