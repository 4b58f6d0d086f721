"""`make bench`: measures the speed, start-up and memory of `kvmux serve`, and compares them with goals and peers.

The rows are in table/goals.py; this module parses the command line and writes the report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import get_args

from tools.bench.table.documents import BENCHMARKS, TABLES, update_performance_doc, update_section
from tools.bench.table.goals import ROWS, Group
from tools.bench.table.models import SHAPES, cache_folder
from tools.bench.table.report import BenchmarkReport, as_json, as_text
from tools.bench.table.runs import RunOptions, measure_rows
from tools.server_process import RunError, sigterm_as_ctrl_c
from tools.status_line import status_line

DESCRIPTION = """\
Starts `kvmux serve` once for each model and weight format, sends it load over HTTP, and compares the figures with
goals, with other servers, and with the limits of this machine, which are measured in the same minute. transformers is
measured, too, in a separate process. Models of real shapes with random weights are made first, and kept. A run during
which other processes used the CPU is repeated, and marked if that does not help."""

FAILED, INTERRUPTED = 2, 130  # exit statuses; 130 is what shells use for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", nargs="+", choices=get_args(Group), default=get_args(Group), help="groups of rows (default: all)")
    add("--model", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES), help="models to measure (default: all)")
    add("--rounds", type=int, default=3, help="rounds of each workload (default: 3)")
    add("--attempts", type=int, default=3, help="attempts at a workload while other processes run (default: 3)")
    add("--models", type=Path, default=cache_folder(), help="folder of the models (default: in the user's cache)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    add("--docs", type=Path, metavar="FOLDER", help="update all measured figures in the documents of this folder")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.attempts) < 1:
        parser.error("--rounds and --attempts should be at least 1")
    rows = [row for row in ROWS if row.group in options.rows and row.shape.name in options.model]
    if not rows:
        parser.error("there are no rows for these --rows and --model: change one of them")
    if options.docs and len(rows) < len(ROWS):
        parser.error("--docs: the documents show all rows; leave --rows and --model out")
    date = datetime.now().astimezone()
    with sigterm_as_ctrl_c(), status_line() as show_status:
        try:
            effort = RunOptions(options.rounds, options.attempts, options.models)
            results = measure_rows(rows, effort, show_status)
            report = BenchmarkReport(date, sorted(results, key=lambda each: rows.index(each.row)))
            if options.docs:
                update_section(options.docs / BENCHMARKS, TABLES, as_text(report))
                update_performance_doc(options.docs, options.models, show_status)
        except (RunError, OSError) as error:
            print(f"make bench: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:  # also SIGTERM; the started processes have ended by now
            return INTERRUPTED
    print(as_text(report))
    if options.json:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
