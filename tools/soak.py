"""`python -m tools.soak`: loads one server for long, and checks that memory, descriptors and gauges do not grow.

Exit code 1 when a problem was found, 2 when no server could be started.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence

from tools.torture.report import make_console, make_soak_tables, print_tables, soak_as_json, write_json
from tools.torture.running import ExpectedAnswerError
from tools.torture.server_process import StartError
from tools.torture.soak import GrowthBounds, SoakPlan, print_start, run_soak


def main(argv: Sequence[str] | None = None) -> int:
    plan, json = _make_plan(_make_parser().parse_args(argv))
    print_start(plan)
    try:
        report = asyncio.run(run_soak(plan))
    except (StartError, ExpectedAnswerError) as error:
        print(error, file=sys.stderr)
        return 2
    console = make_console(json)
    print_tables(console, f"soak, seed {plan.seed}", make_soak_tables(report), report.tally, exact=report.exact)
    if json:
        write_json(json, soak_as_json(report))
    return 1 if report.tally.problems else 0


def _make_plan(flags: argparse.Namespace) -> tuple[SoakPlan, str]:
    seconds = 60 * flags.minutes
    plan = SoakPlan(
        seed=flags.seed or secrets.token_hex(4),
        seconds=seconds,
        round_seconds=min(flags.round_seconds, seconds / 3),
        sample_seconds=min(flags.sample_seconds, seconds / 60),
        clients=flags.clients,
        requests=flags.requests,
        bounds=GrowthBounds(flags.memory_bound, flags.descriptors_bound, flags.threads_bound),
    )
    return plan, flags.json


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.soak",
        description="Load one server for long, and check that memory, descriptors and gauges do not grow.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, usual = parser.add_argument, GrowthBounds()
    add("--minutes", type=float, default=60.0, help="duration of the run")
    add("--seed", default="", help="seed of all random choices; by default a new one, which is printed")
    add("--round-seconds", type=float, default=180.0, help="seconds of load between two checks of the gauges")
    add("--sample-seconds", type=float, default=5.0, help="seconds between two samples of the processes")
    add("--clients", type=int, default=8, help="clients that compare answers")
    add("--requests", type=int, default=60, help="number of different requests")
    add("--memory-bound", type=float, default=usual.memory, help="MiB per hour by which a process may grow")
    add("--descriptors-bound", type=float, default=usual.descriptors, help="descriptors per hour, likewise")
    add("--threads-bound", type=float, default=usual.threads, help="threads per hour, likewise")
    add("--json", default="", metavar="FILE", help="write the report to this file as JSON; -: stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
