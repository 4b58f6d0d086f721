"""What chaos and soak have in common: flags, a server with the load's expected answers, and the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

from tools.server_process import RunError
from tools.torture.checker import Checker, Tally
from tools.torture.clients import Load
from tools.torture.exchange import generate, open_http_client
from tools.torture.faults import stop_server
from tools.torture.requests import draw_specs, make_reference_options
from tools.torture.server_process import DRAIN_SECONDS, ServerProcess

Report = dict[str, Any]


# ---------------------------------------------------------------- the command line
def make_parser(program: str, description: str, minutes: float) -> argparse.ArgumentParser:
    """Return a parser of the flags that chaos and soak have in common."""
    parser = argparse.ArgumentParser(
        f"python -m tools.{program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=minutes, help="duration of the run (%(default)s)")
    parser.add_argument(
        "--seed", default=secrets.token_hex(4), help="seed of all random choices; default: a new one, which is printed"
    )
    parser.add_argument("--requests", type=int, default=60, help="number of different requests (%(default)s)")
    return parser


def run_program(flags: argparse.Namespace, program: Coroutine[Any, Any, Report]) -> int:
    """Run a program and print its report as JSON; return 1 if it has problems, and 2 if no server could be started."""
    print(f"seed {flags.seed}; {flags.minutes:g} minutes", file=sys.stderr)
    try:
        report = asyncio.run(program)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"seed": flags.seed, **report}, indent=2))
    return 1 if report["problems"] else 0


# ---------------------------------------------------------------- a run
@asynccontextmanager
async def serve_load(flags: argparse.Namespace, max_queued_requests: int) -> AsyncIterator[Load]:
    """Start a server, compute the expected answers, and yield a load, not started; then stop the server.

    What is wrong with the server's end, and tracebacks in its log, are problems. Raises RunError.
    """
    server = ServerProcess(max_queued_requests)
    try:
        await server.start()
        async with open_http_client() as http:
            specs = draw_specs(Random(f"{flags.seed} specs"), flags.requests)
            load = Load(server, http, Checker(DRAIN_SECONDS), specs)
            await _compute_expected_answers(load)
            yield load
        tally = load.checker.tally
        await stop_server(server, tally, signal.SIGTERM)
        for line in server.find_crashes():
            tally.add_problem("tracebacks in the log", line)
    finally:
        server.remove()


async def _compute_expected_answers(load: Load) -> None:
    """Send each request alone, without the prefix cache. Raises RunError if one fails."""
    for spec in load.specs:
        outcome = await generate(load.http, load.server.url, spec, make_reference_options(spec))
        if outcome.failure is not None:
            raise RunError(f"{spec.name} fails on an idle server: {outcome.failure} {dict(spec.body)}")
        load.checker.expected_answers[spec.name] = outcome.answer


@contextmanager
def end_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that a report is still made."""
    end, numbers, loop = asyncio.Event(), (signal.SIGINT, signal.SIGTERM), asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, end.set)
    try:
        yield end
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def report_tally(tally: Tally) -> Report:
    """Return the part of a report that the clients counted."""
    counts = dict(sorted(tally.counts.items()))
    return {"counts": counts, "problems": dict(tally.problems.most_common()), "examples": tally.examples}


def describe_counts(tally: Tally) -> str:
    """Return what a status line shows of the counts."""
    counts, num_problems = tally.counts, tally.problems.total()
    return f"{counts['requests sent']} requests, {counts['answers checked']} answers checked, {num_problems} problems"


async def sleep_unless(end: asyncio.Event, seconds: float) -> None:
    """Sleep until the seconds are over or `end` is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(end.wait(), seconds)
