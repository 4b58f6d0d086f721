"""The faults that are injected into a running server, each with the failures that clients may then see.

Knows processes and signals; neither requests nor answers.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import psutil

from tools.torture.checker import Tally
from tools.torture.exchange import CONNECTION_CUT, ENGINE_UNAVAILABLE, REFUSED, STOPPING, TEXT_UNAVAILABLE
from tools.torture.server_process import DRAIN_SECONDS, ServerProcess

ORPHAN_SECONDS = 5.0  # for which children may outlive their supervisor
PAUSE_SECONDS = (0.2, 2.0)  # shortest and longest time for which a process is stopped
SIGTERM_SECONDS = 1.0  # within which a process that does not block SIGTERM ends
REPLACEMENT_SECONDS = 60.0  # within which a hanging process must be replaced
STOP_SECONDS = DRAIN_SECONDS + 10.0  # within which a server must end after a signal

NO_FAILURES: frozenset[str] = frozenset()
WORKER_FAILURES = frozenset({CONNECTION_CUT})
ENGINE_FAILURES = frozenset({ENGINE_UNAVAILABLE})
CHILDREN_FAILURES = WORKER_FAILURES | ENGINE_FAILURES
TEXT_FAILURES = frozenset({TEXT_UNAVAILABLE})
SHUTDOWN_FAILURES = frozenset({CONNECTION_CUT, REFUSED, STOPPING, ENGINE_UNAVAILABLE})


@dataclass
class FaultTarget:
    """The server into which faults are injected, with a random generator and a tally."""

    server: ServerProcess
    draw: Random
    tally: Tally


Affected = Sequence[psutil.Process] | None  # processes that must end because of a fault; None: no process to act on


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the failures of requests that it excuses."""

    name: str
    description: str
    inject: Callable[[FaultTarget], Awaitable[Affected]]
    excuses: frozenset[str]
    orderly: bool = False  # whether running requests must still be answered


# ---------------------------------------------------------------- single processes
Choose = Callable[[FaultTarget], Sequence[psutil.Process]]


def _children(target: FaultTarget) -> Sequence[psutil.Process]:
    roles = target.server.find_roles()
    return [*roles.engines, *roles.workers]


def _one(role: str, target: FaultTarget) -> Sequence[psutil.Process]:
    """Return a random process of a role (a field of `Roles`), if there is one."""
    processes: Sequence[psutil.Process] = getattr(target.server.find_roles(), role)
    return target.draw.sample(processes, min(1, len(processes)))


_engine, _worker, _helper = partial(_one, "engines"), partial(_one, "workers"), partial(_one, "helpers")


def _send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


async def _kill(choose: Choose, target: FaultTarget) -> Affected:
    """Send SIGKILL to the server's processes that `choose` returns, and return them; None if there are none."""
    _send_signal(processes := choose(target), signal.SIGKILL)
    return processes or None


async def _terminate(choose: Choose, target: FaultTarget) -> Affected:
    """Send SIGTERM to children of the supervisor; return those that end: they may block the signal."""
    _send_signal(processes := choose(target), signal.SIGTERM)
    ended, _ = await asyncio.to_thread(psutil.wait_procs, processes, SIGTERM_SECONDS)
    return ended if processes else None


async def _pause(choose: Choose, target: FaultTarget) -> Affected:
    """Stop processes with SIGSTOP, and continue them after PAUSE_SECONDS."""
    _send_signal(processes := choose(target), signal.SIGSTOP)
    try:
        await asyncio.sleep(target.draw.uniform(*PAUSE_SECONDS))
    finally:
        _send_signal(processes, signal.SIGCONT)
    return [] if processes else None


async def _hang(choose: Choose, target: FaultTarget) -> Affected:
    """Stop processes with SIGSTOP; the supervisor must notice it and replace them."""
    _send_signal(processes := choose(target), signal.SIGSTOP)
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, REPLACEMENT_SECONDS)
    for each in left:
        target.tally.add_problem("hangs not noticed", f"{each} hung for {REPLACEMENT_SECONDS:g} s and was not replaced")
    _send_signal(left, signal.SIGCONT)
    return [] if processes else None


# ---------------------------------------------------------------- the whole server
async def _restart(number: signal.Signals, group: bool, target: FaultTarget) -> Affected:
    """Stop the server with a signal that lets it drain, and start it again."""
    await stop_server(target.server, target.tally, number, group=group)
    await target.server.start()
    return []


async def stop_server(server: ServerProcess, tally: Tally, number: signal.Signals, *, group: bool = False) -> None:
    """Stop the server with a signal that lets it drain; count what it should not do or leave behind as problems."""
    children = server.find_processes()[1:]
    server.send_signal(number, group=group)
    if (code := await server.wait(STOP_SECONDS)) != 0:
        tally.add_problem("unclean ends", f"{number.name}{' to the group' if group else ''}: exit code {code}")
    await end_orphans(tally, children)
    server.kill()
    if left := server.find_socket_folders():
        tally.add_problem("socket folders left behind", ", ".join(map(str, left)))


async def _kill_server(target: FaultTarget) -> Affected:
    """Kill the supervisor; its children must end, and the next start must remove its socket folder."""
    server, children = target.server, target.server.find_processes()[1:]
    server.send_signal(signal.SIGKILL)
    await server.wait(ORPHAN_SECONDS)
    await end_orphans(target.tally, children)
    server.kill()
    before = server.find_socket_folders()
    await server.start()
    for folder in before & server.find_socket_folders():
        target.tally.add_problem("socket folders left behind", f"{folder}, also by the next start")
        shutil.rmtree(folder, ignore_errors=True)
    return []


async def end_orphans(tally: Tally, processes: Sequence[psutil.Process]) -> None:
    """Count processes that outlive their parent by ORPHAN_SECONDS as problems, and kill them."""
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, ORPHAN_SECONDS)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            tally.add_problem("processes that outlived their parent", f"{each.pid}: {' '.join(each.cmdline())}")
            each.kill()


# ---------------------------------------------------------------- all of them
def _make_restart(name: str, description: str, number: signal.Signals, *, group: bool) -> Fault:
    inject = partial(_restart, number, group)
    return Fault(name, f"{number.name} to {description}, and a new start", inject, SHUTDOWN_FAILURES, orderly=True)


FAULTS: tuple[Fault, ...] = (
    Fault("kill-engine", "SIGKILL to the engine", partial(_kill, _engine), ENGINE_FAILURES),
    Fault("kill-worker", "SIGKILL to an API worker", partial(_kill, _worker), WORKER_FAILURES),
    Fault("kill-children", "SIGKILL to engine and workers", partial(_kill, _children), CHILDREN_FAILURES),
    Fault("kill-helper", "SIGKILL to a child of a worker or of the engine", partial(_kill, _helper), TEXT_FAILURES),
    Fault("terminate-engine", "SIGTERM to the engine alone", partial(_terminate, _engine), NO_FAILURES),
    Fault("terminate-worker", "SIGTERM to an API worker alone", partial(_terminate, _worker), NO_FAILURES),
    Fault("stop-engine", "SIGSTOP to the engine, and SIGCONT up to 2 s later", partial(_pause, _engine), NO_FAILURES),
    Fault("stop-worker", "SIGSTOP to a worker, and SIGCONT up to 2 s later", partial(_pause, _worker), NO_FAILURES),
    Fault("hang-engine", "SIGSTOP to the engine, for good", partial(_hang, _engine), ENGINE_FAILURES),
    Fault("hang-worker", "SIGSTOP to an API worker, for good", partial(_hang, _worker), WORKER_FAILURES),
    _make_restart("terminate", "the supervisor", signal.SIGTERM, group=False),
    _make_restart("terminate-group", "all processes, as systemd does", signal.SIGTERM, group=True),
    _make_restart("hang-up", "the supervisor", signal.SIGHUP, group=False),
    _make_restart("hang-up-group", "all processes, as a closed terminal does", signal.SIGHUP, group=True),
    _make_restart("interrupt-group", "all processes, as Ctrl-C does", signal.SIGINT, group=True),
    Fault("kill", "SIGKILL to the supervisor, and a new start", _kill_server, SHUTDOWN_FAILURES),
)
