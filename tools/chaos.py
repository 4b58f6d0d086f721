"""`python -m tools.chaos`: kills, stops and restarts a server under load, and checks every answer.

Faults are injected one at a time: the next follows when the server answers again and all its processes are back. Every
answer is compared with that of an idle server. Exit code 1 when a problem was found, 2 when no server could be started.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from time import monotonic

import psutil

from tools.server_process import RunError, is_ready
from tools.status_line import status_line
from tools.torture.checker import Injection
from tools.torture.clients import Load, start_clients
from tools.torture.faults import FAULTS, Fault, FaultTarget, end_orphans
from tools.torture.requests import make_reference_options
from tools.torture.running import (
    Report,
    describe_counts,
    end_on_signals,
    make_parser,
    report_tally,
    run_program,
    serve_load,
    sleep_unless,
)
from tools.torture.server_process import is_alive

RECOVERY_SECONDS = 120.0  # within which the server must have recovered from a fault
MAX_QUEUED_REQUESTS = 12  # few, so that the queue is full at times
POLL_SECONDS = 0.02  # between two checks of a recovery
PROBE_PAUSE = 1.0  # seconds between two probes of isolation, at most
PAUSE_BETWEEN_FAULTS = (0.3, 2.0)  # seconds from one fault's recovery to the next fault


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("chaos", "Kill, stop and restart a server under load, and check every answer.", 10.0)
    parser.epilog = "faults:\n" + "\n".join(f"  {fault.name:18} {fault.description}" for fault in FAULTS)
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="FAULT", help="faults (default: all)"
    )
    flags = parser.parse_args(argv)
    return run_program(flags, run_chaos(flags))


async def run_chaos(flags: argparse.Namespace) -> Report:
    """Run a server and its clients for a time, and inject faults. Raises RunError."""
    async with serve_load(flags, MAX_QUEUED_REQUESTS) as load:
        began = monotonic()
        with end_on_signals() as end, status_line() as show_status:
            injector = FaultInjector(
                [each for each in FAULTS if each.name in flags.only], load, flags.seed, show_status
            )
            await injector.run(60 * flags.minutes, end)
    return injector.make_report(monotonic() - began)


class FaultInjector:
    """Injects one fault after another while the clients of a load run."""

    def __init__(self, faults: Sequence[Fault], load: Load, seed: str, show_status: Callable[[str], None]) -> None:
        # of each fault: the seconds until a completion succeeds, and until all processes are back
        self._recoveries: dict[str, list[Sequence[float]]] = {fault.name: [] for fault in faults}
        self._faults = faults
        self._load = load
        self._server = load.server
        self._tally = load.checker.tally
        self._seed = seed
        self._draw = Random(f"{seed} faults")
        self._show_status = show_status

    async def run(self, seconds: float, end: asyncio.Event) -> None:
        """Start the clients, and inject faults until the time is over; clients then finish their current requests."""
        self._load.running.set()
        async with asyncio.TaskGroup() as group:
            start_clients(group, self._load, self._seed, PROBE_PAUSE)
            try:
                await self._inject_until(monotonic() + seconds, end)
            except RunError as error:
                self._tally.add_problem("servers that did not start again", str(error))
            finally:
                self._load.running.clear()

    async def _inject_until(self, deadline: float, end: asyncio.Event) -> None:
        """Inject random faults; none is repeated before all were drawn."""
        await sleep_unless(end, 1.0)
        remaining: list[Fault] = []
        while monotonic() < deadline and not end.is_set():
            remaining = remaining or self._draw.sample(self._faults, len(self._faults))
            await self._inject(remaining.pop())
            await sleep_unless(end, min(self._draw.uniform(*PAUSE_BETWEEN_FAULTS), max(0.0, deadline - monotonic())))

    async def _inject(self, fault: Fault) -> None:
        """Inject a fault, and wait until the server has recovered."""
        if (code := self._server.exit_code) is not None:
            self._tally.add_problem("servers that ended by themselves", f"exit code {code}, before {fault.name}")
            self._server.kill()
            await self._server.start()
        self._show_status(f"{fault.name}: {describe_counts(self._tally)}")
        injection = Injection(fault.name, fault.excuses, fault.orderly)
        self._load.checker.injections.append(injection)
        before = self._server.find_processes()
        affected = await fault.inject(FaultTarget(self._server, self._draw, self._tally))
        if affected is not None:
            await self._wait_for_recovery(injection, affected)
        now = self._server.find_processes()
        await end_orphans(self._tally, [each for each in before if each not in now and is_alive(each)])
        injection.ended = monotonic()

    async def _wait_for_recovery(self, injection: Injection, affected: Sequence[psutil.Process]) -> None:
        """Wait until the server answers, and until the affected processes have been replaced."""

        async def is_whole() -> bool:
            return not any(map(is_alive, affected)) and self._server.find_roles().complete

        deadline, seconds = monotonic() + RECOVERY_SECONDS, list[float]()
        for recovered in (self._is_answering, is_whole):
            while not await recovered():
                if monotonic() > deadline:
                    missing = f"{injection.name}: {self._server.find_roles()}"
                    self._tally.add_problem("recoveries that did not come", missing)
                    return
                await asyncio.sleep(POLL_SECONDS)
            seconds.append(monotonic() - injection.began)
        self._recoveries[injection.name].append(seconds)

    async def _is_answering(self) -> bool:
        """Return whether the server is ready and a completion succeeds."""
        if not await asyncio.to_thread(is_ready, self._server.url):
            return False
        spec = self._draw.choice(self._load.specs)
        outcome = await self._load.check_answer(self._server.url, spec, make_reference_options(spec))
        return outcome.failure is None

    def make_report(self, seconds: float) -> Report:
        faults = {name: _summarize(recoveries) for name, recoveries in self._recoveries.items()}
        run = {"seconds": round(seconds), "starts": self._server.starts, "faults": faults}
        return run | report_tally(self._tally)


def _summarize(recoveries: Sequence[Sequence[float]]) -> dict[str, object]:
    """Return how often a fault was injected, and the medians and maxima of the seconds to recover."""
    if not recoveries:
        return {"injected": 0}
    answering, whole = (
        f"median {median(each):.2f}, at most {max(each):.2f} s" for each in zip(*recoveries, strict=True)
    )
    return {"injected": len(recoveries), "answering": answering, "whole": whole}


if __name__ == "__main__":
    sys.exit(main())
