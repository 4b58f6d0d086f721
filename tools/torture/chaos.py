"""Injects faults into a server under load, while clients compare every answer with that of an idle server.

Faults are injected one at a time: the next follows when the server answers again and all its processes are back. The
faults are in faults.py, the checks of answers in checker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

import psutil

from tools.torture.checker import Injection
from tools.torture.clients import Load, start_clients
from tools.torture.faults import Fault, FaultTarget, count_orphans
from tools.torture.requests import make_reference_options
from tools.torture.running import (
    open_exchange,
    prepare_load,
    print_line,
    print_progress,
    running_server,
    set_on_signals,
    sleep_unless,
)
from tools.torture.server_process import DRAIN_SECONDS, POLL_SECONDS, ServerProcess, StartError, is_alive, is_ready
from tools.torture.tally import Tally

RECOVERY_SECONDS = 120.0  # within which the server must have recovered from a fault
MAX_QUEUED_REQUESTS = 12  # few, so that the queue is full at times
PROBE_PAUSE = 1.0  # seconds between two probes of isolation, at most
PAUSE_BETWEEN_FAULTS = (0.3, 2.0)  # seconds from one fault's recovery to the next fault


@dataclass(frozen=True)
class ChaosPlan:
    """The parameters of a chaos run."""

    seed: str
    seconds: float
    faults: Sequence[Fault]
    clients: int
    requests: int


@dataclass
class RecoveryTimes:
    """The recovery times of one kind of fault."""

    answering_seconds: list[float] = field(default_factory=list)  # from each fault until a completion succeeds
    whole_seconds: list[float] = field(default_factory=list)  # from each fault until all processes are back
    num_without_target: int = 0  # times when there was no process to act on


@dataclass
class ChaosReport:
    """The results of a chaos run."""

    plan: ChaosPlan
    exact: bool
    tally: Tally
    recoveries: dict[str, RecoveryTimes]
    seconds: float
    starts: int


async def run_chaos(plan: ChaosPlan) -> ChaosReport:
    """Run a server and its clients for a time, and inject faults. Raises StartError, ExpectedAnswerError."""
    async with running_server(MAX_QUEUED_REQUESTS) as (server, exact), open_exchange() as exchange:
        load = await prepare_load(server, exchange, exact, plan.seed, plan.requests)
        tally = load.checker.tally
        conductor = FaultInjector(plan, load)
        began = monotonic()
        await conductor.run()
        await end_server(server, tally)
        return ChaosReport(plan, exact, tally, conductor.recoveries, monotonic() - began, server.starts)


async def end_server(server: ServerProcess, tally: Tally) -> None:
    """Stop the server; count a bad exit code, left-over folders and tracebacks in its log as problems."""
    if (code := await server.stop()) != 0:
        tally.add_problem("unclean ends", f"the last one: exit code {code}")
    if left := server.find_socket_folders():
        tally.add_problem("socket folders left behind", f"after the last server's end: {', '.join(sorted(left))}")
    for line in server.find_crashes():
        tally.add_problem("tracebacks in the log", line)


class FaultInjector:
    """Injects one fault after another while the clients of a load run."""

    def __init__(self, plan: ChaosPlan, load: Load) -> None:
        self.recoveries = {fault.name: RecoveryTimes() for fault in plan.faults}
        self._plan = plan
        self._load = load
        self._server = load.server
        self._tally = load.checker.tally
        self._draw = Random(f"{plan.seed} faults")
        self._remaining_faults: list[Fault] = []
        self._status = "nothing yet"

    async def run(self) -> None:
        """Start the clients, and inject faults until the time is over; clients then finish their current requests."""
        end = asyncio.Event()
        self._load.running.set()
        async with set_on_signals(end), asyncio.TaskGroup() as group:
            progress = group.create_task(print_progress(self._format_progress))
            start_clients(group, self._load, self._plan.seed, self._plan.clients, PROBE_PAUSE)
            try:
                await self._inject_until(monotonic() + self._plan.seconds, end)
            except StartError as error:
                self._tally.add_problem("servers that did not start again", str(error))
            finally:
                self._load.running.clear()
                progress.cancel()

    async def _inject_until(self, deadline: float, end: asyncio.Event) -> None:
        await sleep_unless(end, 1.0)
        while monotonic() < deadline and not end.is_set():
            await self._inject(self._next_fault())
            await sleep_unless(end, min(self._draw.uniform(*PAUSE_BETWEEN_FAULTS), max(0.0, deadline - monotonic())))

    def _next_fault(self) -> Fault:
        """Return a random fault; no fault is repeated before all were drawn."""
        if not self._remaining_faults:
            self._remaining_faults = list(self._plan.faults)
            self._draw.shuffle(self._remaining_faults)
        return self._remaining_faults.pop()

    async def _inject(self, fault: Fault) -> None:
        """Inject a fault, and wait until the server has recovered."""
        if (code := self._server.exit_code) is not None:
            self._tally.add_problem("servers that ended by themselves", f"exit code {code}, before {fault.name}")
            self._server.kill()
            await self._server.start()
        self._status = fault.name
        injection = Injection(fault.name, fault.excuses, fault.orderly)
        self._load.checker.injections.append(injection)
        target = FaultTarget(self._server, self._draw, self._tally, DRAIN_SECONDS)
        before = self._server.find_processes()
        affected = await fault.inject(target)
        if affected is None:
            self.recoveries[fault.name].num_without_target += 1
        else:
            await self._wait_for_recovery(fault, injection.began, affected)
        now = self._server.find_processes()
        await count_orphans(self._tally, [each for each in before if each not in now and is_alive(each)])
        injection.ended = monotonic()
        self._status = f"nothing, after {fault.name}"

    async def _wait_for_recovery(self, fault: Fault, began: float, affected: Sequence[psutil.Process]) -> None:
        """Wait until the server answers, and until the affected processes have been replaced."""
        recoveries = self.recoveries[fault.name]
        deadline = monotonic() + RECOVERY_SECONDS

        async def is_whole() -> bool:
            return not any(map(is_alive, affected)) and self._server.find_roles().complete

        for recovered, seconds in (
            (self._is_answering, recoveries.answering_seconds),
            (is_whole, recoveries.whole_seconds),
        ):
            while not await recovered():
                if monotonic() > deadline:
                    self._tally.add_problem(
                        "recoveries that did not come", f"{fault.name}: {self._server.find_roles()}"
                    )
                    return
                await asyncio.sleep(POLL_SECONDS)
            seconds.append(monotonic() - began)

    async def _is_answering(self) -> bool:
        """Return whether the server is ready and a completion succeeds."""
        if not await is_ready(self._server.url):
            return False
        spec = self._draw.choice(self._load.specs)
        outcome = await self._load.exchange.send(self._server.url, spec, make_reference_options(spec))
        self._load.checker.check(spec, outcome)
        return outcome.failure is None

    def _format_progress(self) -> str:
        counts, wrong = self._tally.counts, sum(self._tally.problems.values())
        injected = sum(len(each.whole_seconds) for each in self.recoveries.values())
        return (
            f"{counts['requests sent']} requests, {counts['answers checked']} answers checked, {injected} faults, "
            f"{wrong} problems; now: {self._status}"
        )


def print_start(plan: ChaosPlan) -> None:
    print_line(f"seed {plan.seed}; {plan.seconds / 60:g} minutes of {', '.join(fault.name for fault in plan.faults)}")
