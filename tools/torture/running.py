"""Functions that chaos and soak share: start a server, compute expected answers, show progress, stop at a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from time import monotonic

import httpx

from tools.torture.checker import Checker
from tools.torture.clients import Load
from tools.torture.exchange import HttpClient
from tools.torture.requests import draw_specs, make_reference_options
from tools.torture.server_process import DRAIN_SECONDS, ServerProcess, StartError
from tools.torture.tally import Tally

TIMEOUT_SECONDS = 90.0  # after which a request without an answer or an error counts as lost
PROGRESS_SECONDS = 10.0  # between two lines of progress
DETERMINISM_ERROR = "deterministic:"  # in the error of a server that cannot give answers that are equal bit for bit


class ExpectedAnswerError(Exception):
    """Raised when a request fails although it is alone on the server."""


def print_line(text: str) -> None:
    """Print progress to stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def running_server(max_queued_requests: int) -> AsyncIterator[tuple[ServerProcess, bool]]:
    """Start a server; yield it, and whether its answers are equal bit for bit (only with C++ kernels).

    Raises StartError.
    """
    server, exact = ServerProcess(deterministic=True, max_queued_requests=max_queued_requests), True
    try:
        try:
            await server.start()
        except StartError as error:
            if DETERMINISM_ERROR not in str(error):
                raise
            server.remove()
            server, exact = ServerProcess(deterministic=False, max_queued_requests=max_queued_requests), False
            await server.start()
        yield server, exact
    finally:
        server.remove()


@asynccontextmanager
async def open_exchange(statuses: Counter[int] | None = None) -> AsyncIterator[HttpClient]:
    """Open an HTTP client that ignores proxy settings in the environment, and counts responses in `statuses`."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as http:
        yield HttpClient(http, TIMEOUT_SECONDS, Counter() if statuses is None else statuses)


async def prepare_load(server: ServerProcess, exchange: HttpClient, exact: bool, seed: str, number: int) -> Load:
    """Compute the expected answers of `number` requests; return a load, not started. Raises ExpectedAnswerError."""
    began = monotonic()
    checker = Checker(Tally(), DRAIN_SECONDS, exact=exact)
    specs = draw_specs(Random(f"{seed} specs"), number)
    for spec in specs:
        outcome = await exchange.send(server.url, spec, make_reference_options(spec))
        if outcome.failure is not None:
            raise ExpectedAnswerError(f"{spec.name} fails on an idle server: {outcome.failure} {dict(spec.body)}")
        checker.expected_answers[spec.name] = outcome.answer
    print_line(f"computed {number} answers alone in {monotonic() - began:.1f} s")
    return Load(server, exchange, checker, specs)


async def print_progress(format_progress: Callable[[], str]) -> None:
    """Print `format_progress()` every few seconds until cancelled."""
    began = monotonic()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        print_line(f"{monotonic() - began:6.0f} s  {format_progress()}")


@asynccontextmanager
async def set_on_signals(end: asyncio.Event) -> AsyncIterator[None]:
    """Set `end` at SIGINT or SIGTERM, so that a report is still made."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, end.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def sleep_unless(end: asyncio.Event, seconds: float) -> None:
    """Sleep until the seconds are over or `end` is set."""
    try:
        async with asyncio.timeout(seconds):
            await end.wait()
    except TimeoutError:
        pass
