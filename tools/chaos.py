"""`python -m tools.chaos`: kills, stops and restarts a server under load, and checks every answer.

Exit code 1 when a problem was found, 2 when no server could be started.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence

from tools.torture.chaos import ChaosPlan, print_start, run_chaos
from tools.torture.faults import FAULTS, Fault
from tools.torture.report import chaos_as_json, make_chaos_tables, make_console, print_tables, write_json
from tools.torture.running import ExpectedAnswerError
from tools.torture.server_process import StartError


def main(argv: Sequence[str] | None = None) -> int:
    flags = _make_parser().parse_args(argv)
    faults = select_faults(flags.only, flags.without)
    plan = ChaosPlan(flags.seed or secrets.token_hex(4), 60 * flags.minutes, faults, flags.clients, flags.requests)
    print_start(plan)
    try:
        report = asyncio.run(run_chaos(plan))
    except (StartError, ExpectedAnswerError) as error:
        print(error, file=sys.stderr)
        return 2
    console = make_console(flags.json)
    print_tables(console, f"chaos, seed {plan.seed}", make_chaos_tables(report), report.tally, exact=report.exact)
    if flags.json:
        write_json(flags.json, chaos_as_json(report))
    return 1 if report.tally.problems else 0


def select_faults(only: Sequence[str], without: Sequence[str]) -> list[Fault]:
    """Return the faults to inject: those named in `only`, or all if it is empty, without those in `without`."""
    return [fault for fault in FAULTS if (not only or fault.name in only) and fault.name not in without]


def _make_parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {fault.name:18} {fault.description}" for fault in FAULTS)
    parser = argparse.ArgumentParser(
        "python -m tools.chaos",
        description="Kill, stop and restart a server under load, and check every answer.",
        epilog=f"faults:\n{faults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the run (%(default)s)")
    parser.add_argument("--seed", default="", help="seed of all random choices; default: a new one, which is printed")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="FAULT", help="faults (default: all)")
    parser.add_argument("--without", nargs="+", choices=names, default=[], metavar="FAULT", help="faults to leave out")
    parser.add_argument(
        "--clients", type=int, default=8, help="clients that compare answers; a few others poll (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=60, help="number of different requests (%(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the report to this file as JSON; -: stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
