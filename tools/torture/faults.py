"""The faults that are injected into a running server, each with the failures that clients may then see.

Knows processes and signals; neither requests nor answers.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from time import monotonic

import psutil

from tools.torture.exchange import CONNECTION_CUT, ENGINE_UNAVAILABLE, REFUSED, STOPPING, TEXT_UNAVAILABLE
from tools.torture.server_process import POLL_SECONDS, ServerProcess
from tools.torture.tally import Tally

ORPHAN_SECONDS = 5.0  # for which children may outlive their supervisor
PAUSE_SECONDS = (0.2, 2.0)  # shortest and longest time for which a process is stopped
SIGTERM_SECONDS = 1.0  # within which a process that does not block SIGTERM ends
REPLACEMENT_SECONDS = 60.0  # within which a hanging process must be replaced
STOP_MARGIN_SECONDS = 10.0  # in addition to the drain, within which a server must end after a signal

NO_FAILURES: frozenset[str] = frozenset()
WORKER_FAILURES = frozenset({CONNECTION_CUT})
ENGINE_FAILURES = frozenset({ENGINE_UNAVAILABLE})
TEXT_FAILURES = frozenset({TEXT_UNAVAILABLE})
SHUTDOWN_FAILURES = frozenset({CONNECTION_CUT, REFUSED, STOPPING, ENGINE_UNAVAILABLE})


@dataclass
class FaultTarget:
    """The server into which faults are injected, with a random generator and a tally."""

    server: ServerProcess
    draw: Random
    tally: Tally
    drain_seconds: float


Affected = list[psutil.Process] | None  # processes that must end because of a fault; None: no process to act on


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the failures of requests that it excuses."""

    name: str
    description: str
    inject: Callable[[FaultTarget], Awaitable[Affected]]
    excuses: frozenset[str]
    orderly: bool = False  # whether running requests must still be answered


# ---------------------------------------------------------------- single processes
def _send_signal(processes: Iterable[psutil.Process | None], number: signal.Signals) -> Affected:
    """Signal processes and return them; None if there are none."""
    found = [each for each in processes if each is not None]
    for each in found:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    return found or None


def _choose_one(target: FaultTarget, processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return a random one of the processes, as a list; empty if there are none."""
    return [target.draw.choice(processes)] if processes else []


async def _kill_engine(target: FaultTarget) -> Affected:
    return _send_signal([target.server.find_roles().engine], signal.SIGKILL)


async def _kill_worker(target: FaultTarget) -> Affected:
    return _send_signal(_choose_one(target, target.server.find_roles().workers), signal.SIGKILL)


async def _kill_children(target: FaultTarget) -> Affected:
    roles = target.server.find_roles()
    return _send_signal([roles.engine, *roles.workers], signal.SIGKILL)


async def _kill_helper(target: FaultTarget) -> Affected:
    return _send_signal(_choose_one(target, target.server.find_roles().helpers), signal.SIGKILL)


async def _terminate_child(target: FaultTarget, processes: Sequence[psutil.Process | None]) -> Affected:
    """Send SIGTERM to children of the supervisor; return them if they end, and [] if they block the signal."""
    affected = _send_signal(processes, signal.SIGTERM)
    if affected is None:
        return None
    deadline = monotonic() + SIGTERM_SECONDS
    while monotonic() < deadline:
        roles = target.server.find_roles()
        if not all(each in (roles.engine, *roles.workers) for each in affected):
            return affected
        await asyncio.sleep(POLL_SECONDS)
    return []


async def _terminate_worker(target: FaultTarget) -> Affected:
    return await _terminate_child(target, _choose_one(target, target.server.find_roles().workers))


async def _terminate_engine(target: FaultTarget) -> Affected:
    return await _terminate_child(target, [target.server.find_roles().engine])


async def _pause(target: FaultTarget, processes: Sequence[psutil.Process | None]) -> Affected:
    """Stop processes with SIGSTOP, and continue them after PAUSE_SECONDS."""
    stopped = _send_signal(processes, signal.SIGSTOP)
    try:
        await asyncio.sleep(target.draw.uniform(*PAUSE_SECONDS))
    finally:
        _send_signal(processes, signal.SIGCONT)
    return None if stopped is None else []


async def _stop_engine(target: FaultTarget) -> Affected:
    return await _pause(target, [target.server.find_roles().engine])


async def _stop_worker(target: FaultTarget) -> Affected:
    return await _pause(target, _choose_one(target, target.server.find_roles().workers))


async def _hang(target: FaultTarget, processes: Sequence[psutil.Process | None]) -> Affected:
    """Stop processes with SIGSTOP; the supervisor must notice it and replace them."""
    if (stopped := _send_signal(processes, signal.SIGSTOP)) is None:
        return None
    _, left = await asyncio.to_thread(psutil.wait_procs, stopped, REPLACEMENT_SECONDS)
    for each in left:
        target.tally.add_problem("hangs not noticed", f"{each} hung for {REPLACEMENT_SECONDS:g} s and was not replaced")
    _send_signal(left, signal.SIGCONT)
    return []


async def _hang_engine(target: FaultTarget) -> Affected:
    return await _hang(target, [target.server.find_roles().engine])


async def _hang_worker(target: FaultTarget) -> Affected:
    return await _hang(target, _choose_one(target, target.server.find_roles().workers))


# ---------------------------------------------------------------- the whole server
async def _restart(target: FaultTarget, number: signal.Signals, *, group: bool) -> Affected:
    """Stop the server with a signal that lets it drain, and start it again."""
    children = target.server.find_processes()[1:]
    target.server.send_signal(number, group=group)
    code = await target.server.wait(target.drain_seconds + STOP_MARGIN_SECONDS)
    if code != 0:
        target.tally.add_problem("unclean ends", f"{number.name}{' to the group' if group else ''}: exit code {code}")
    return await _start_again(target, children)


async def _kill_server(target: FaultTarget) -> Affected:
    children = target.server.find_processes()[1:]
    target.server.send_signal(signal.SIGKILL)
    await target.server.wait(ORPHAN_SECONDS)
    return await _start_again(target, children)


async def _start_again(target: FaultTarget, children: list[psutil.Process]) -> Affected:
    """Check that no process or socket folder of the server is left, and start it again."""
    await _end_leftovers(target, children)
    before = target.server.find_socket_folders()
    await target.server.start()
    for folder in before & target.server.find_socket_folders():
        target.tally.add_problem("socket folders left behind", f"{folder}, also by the next start")
        target.server.remove_socket_folder(folder)
    return []


async def _end_leftovers(target: FaultTarget, children: list[psutil.Process]) -> None:
    """Count processes that outlive their server as problems, and kill them."""
    await count_orphans(target.tally, children)
    target.server.kill()


async def count_orphans(tally: Tally, processes: Sequence[psutil.Process]) -> None:
    """Count processes that outlive their parent by ORPHAN_SECONDS as problems, and kill them."""
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, ORPHAN_SECONDS)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            tally.add_problem("processes that outlived their parent", f"{each.pid}: {' '.join(each.cmdline())}")
            each.kill()


async def _terminate(target: FaultTarget) -> Affected:
    return await _restart(target, signal.SIGTERM, group=False)


async def _terminate_group(target: FaultTarget) -> Affected:
    return await _restart(target, signal.SIGTERM, group=True)


async def _hang_up(target: FaultTarget) -> Affected:
    return await _restart(target, signal.SIGHUP, group=False)


async def _hang_up_group(target: FaultTarget) -> Affected:
    return await _restart(target, signal.SIGHUP, group=True)


async def _interrupt_group(target: FaultTarget) -> Affected:
    return await _restart(target, signal.SIGINT, group=True)


# ---------------------------------------------------------------- all of them
FAULTS: tuple[Fault, ...] = (
    Fault("kill-engine", "SIGKILL to the engine", _kill_engine, ENGINE_FAILURES),
    Fault("kill-worker", "SIGKILL to an API worker", _kill_worker, WORKER_FAILURES),
    Fault(
        "kill-children", "SIGKILL to the engine and all API workers", _kill_children, WORKER_FAILURES | ENGINE_FAILURES
    ),
    Fault(
        "kill-helper", "SIGKILL to a child of a worker or of the engine, if there is one", _kill_helper, TEXT_FAILURES
    ),
    Fault("terminate-engine", "SIGTERM to the engine alone", _terminate_engine, NO_FAILURES),
    Fault("terminate-worker", "SIGTERM to an API worker alone", _terminate_worker, NO_FAILURES),
    Fault("stop-engine", "SIGSTOP to the engine, and SIGCONT up to 2 s later", _stop_engine, NO_FAILURES),
    Fault("stop-worker", "SIGSTOP to an API worker, and SIGCONT up to 2 s later", _stop_worker, NO_FAILURES),
    Fault("hang-engine", "SIGSTOP to the engine, for good", _hang_engine, ENGINE_FAILURES),
    Fault("hang-worker", "SIGSTOP to an API worker, for good", _hang_worker, WORKER_FAILURES),
    Fault("terminate", "SIGTERM to the supervisor, and a new start", _terminate, SHUTDOWN_FAILURES, orderly=True),
    Fault(
        "terminate-group",
        "SIGTERM to all processes, as systemd does, and a new start",
        _terminate_group,
        SHUTDOWN_FAILURES,
        orderly=True,
    ),
    Fault("hang-up", "SIGHUP to the supervisor, and a new start", _hang_up, SHUTDOWN_FAILURES, orderly=True),
    Fault(
        "hang-up-group",
        "SIGHUP to all processes, as a closed terminal does, and a new start",
        _hang_up_group,
        SHUTDOWN_FAILURES,
        orderly=True,
    ),
    Fault(
        "interrupt-group",
        "SIGINT to all processes, as Ctrl-C does, and a new start",
        _interrupt_group,
        SHUTDOWN_FAILURES,
        orderly=True,
    ),
    Fault("kill", "SIGKILL to the supervisor, and a new start", _kill_server, SHUTDOWN_FAILURES),
)
