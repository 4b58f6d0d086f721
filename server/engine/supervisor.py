"""Keeps one engine and the API workers running, and stops them in order.

    starting -> serving            the engine's {"ready": ...}
    starting -> stopping           its {"error": ...} or any child's SettingsError: exit code 2; any other death: 1
    serving  -> stopping           SIGTERM or SIGINT: 0; workers first, then the engine

A child that dies while serving is started again, later and later while it keeps dying. Knows neither models nor HTTP,
and imports neither torch nor transformers: the children are named by import strings.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import monotonic
from typing import Any

from config.settings import Settings
from server.engine.lifeline import USER_ERROR, run_child

log = logging.getLogger(__name__)

STOPPED, DIED, REFUSED, INTERRUPTED = 0, 1, USER_ERROR, 130  # exit codes
MAX_SOCKET_PATH = 103  # bytes; macOS has room for 104 with the closing zero


@dataclass(frozen=True)
class Targets:
    """What the children run, as "package.module:function"."""

    engine: str = "server.engine.main:run"  # (settings, socket_path, status, restarts)
    worker: str = "server.api.worker:serve_worker"  # (settings, socket_path, listening_socket)


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    first_delay: float = 0.5  # before a dead child is started again; doubles while it keeps dying
    longest_delay: float = 30.0
    healthy_after: float = 60.0  # a child that served this long starts with the first delay again
    worker_margin: float = 5.0  # beyond drain_seconds, for last words
    engine_grace: float = 10.0


class Child:
    """A process that is to be running. Owned by the supervisor; `start` gives a started process."""

    def __init__(self, name: str, start: Callable[[str], SpawnProcess], timing: Timing) -> None:
        self.name = name
        self.process: SpawnProcess | None = None
        self.due = 0.0  # when to start it, while it is not running
        self.healthy_from = 0.0
        self._start = start
        self._timing = timing
        self._delay = 0.0

    def start(self) -> None:
        self.process = self._start(self.name)
        self.healthy_from = monotonic()

    def reap(self) -> int | None:
        """Takes note that the process has ended; returns its exit code."""
        assert self.process is not None, self.name
        self.process.join()
        exitcode = self.process.exitcode
        self.process.close()
        self.process = None
        return exitcode

    def postpone(self) -> float:
        """Sets when it is to be started again; returns the seconds until then."""
        timing, now = self._timing, monotonic()
        healthy = now - self.healthy_from >= timing.healthy_after
        self._delay = timing.first_delay if healthy else max(timing.first_delay, 2 * self._delay)
        self._delay = min(self._delay, timing.longest_delay)
        self.due = now + self._delay
        return self._delay

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.reap()


def in_words(exitcode: int | None) -> str:
    """How a process ended."""
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"killed by {name}" + (" (by the system, if memory ran out)" if name == "SIGKILL" else "")


class Supervisor:
    """Runs until it is told to stop. `announce` gets the engine's summary once, when it is ready the first time."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        announce: Callable[[dict[str, Any]], None],
        *,
        targets: Targets = Targets(),
        timing: Timing = Timing(),
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._announce = announce
        self._targets = targets
        self._timing = timing
        self._spawn_context = multiprocessing.get_context("spawn")
        self._socket_path = ""  # this and _signals are set by run()
        self._signals: socket.socket
        self._status: Connection | None = None  # the engine's word: {"ready": ...} or {"error": ...}
        self._serving = False
        self._outcome: int | None = None  # exit code, once it is time to stop
        self._engines = 0  # started so far
        self._engine = Child("engine", self._start_engine, timing)
        self._workers = [Child(f"worker-{i}", self._start_worker, timing) for i in range(settings.workers)]

    def run(self) -> int:
        """Returns the program's exit code. Call it in the main thread, which hears the signals."""
        with private_directory() as directory, _signals_as_bytes() as self._signals:
            self._socket_path = os.path.join(directory, "engine.sock")
            try:
                for child in self._children():
                    child.start()
                while self._outcome is None:
                    self._step()
                return self._stop(self._outcome)
            finally:
                for child in self._children():
                    child.kill()

    def _children(self) -> list[Child]:
        return [self._engine, *self._workers]

    # ------------------------------------------------------------ starting
    def _start_engine(self, name: str) -> SpawnProcess:
        Path(self._socket_path).unlink(missing_ok=True)  # a killed engine leaves it behind
        self._status, theirs = self._spawn_context.Pipe(duplex=False)
        self._engines += 1
        with theirs:
            return self._spawn(name, self._targets.engine, theirs, self._engines - 1)

    def _start_worker(self, name: str) -> SpawnProcess:
        return self._spawn(name, self._targets.worker, self._listener)

    def _spawn(self, name: str, target: str, *rest: Connection | socket.socket | int) -> SpawnProcess:
        args = (target, self._settings, self._socket_path, *rest)
        process = self._spawn_context.Process(target=run_child, args=args, name=name, daemon=True)
        with _deaf_to_ctrl_c():
            process.start()
        return process

    # ------------------------------------------------------------ running
    def _step(self) -> None:
        """Waits for something to happen, and deals with it."""
        happened = wait(self._awaited(), timeout=self._seconds_until_due())
        if self._signals in happened:
            self._signals.recv(64)
            self._outcome = STOPPED
            return
        if self._status in happened:  # before the engine's end: its last word explains it
            self._hear_engine()
        for child in self._children():
            if child.process is None:
                if child.due <= monotonic():
                    child.start()
            elif child.process.sentinel in happened:
                self._on_death(child)

    def _awaited(self) -> list[Any]:
        sentinels = [child.process.sentinel for child in self._children() if child.process is not None]
        return [self._signals, *sentinels, *([self._status] if self._status else [])]

    def _seconds_until_due(self) -> float | None:
        due = [child.due for child in self._children() if child.process is None]
        return max(0.0, min(due) - monotonic()) if due else None

    def _hear_engine(self) -> None:
        assert self._status is not None
        try:
            message = self._status.recv()
        except (EOFError, OSError):  # it ended; its sentinel says so too
            self._status.close()
            self._status = None
            return
        if "ready" in message:
            self._on_ready(message["ready"])
        elif self._serving:
            log.error("the engine cannot start again: %s", message["error"])
        else:
            log.error("cannot start: %s", message["error"])
            self._outcome = REFUSED

    def _on_ready(self, summary: dict[str, Any]) -> None:
        self._engine.healthy_from = monotonic()
        if self._serving:
            log.warning("the engine is ready again")
        else:
            self._serving = True
            self._announce(summary)

    def _on_death(self, child: Child) -> None:
        exitcode = child.reap()
        how = in_words(exitcode)
        if self._outcome is not None:
            return
        if self._serving:
            log.error("%s ended: %s; it is started again in %.1f s", child.name, how, child.postpone())
        elif exitcode == USER_ERROR:  # it has said why
            self._outcome = REFUSED
        else:
            log.error("%s ended before the server was ready: %s; its messages are above", child.name, how)
            self._outcome = DIED

    # ------------------------------------------------------------ stopping
    def _stop(self, outcome: int) -> int:
        """Workers first, as their requests need the engine. Returns the exit code."""
        self._listener.close()
        if outcome == STOPPED:
            log.info("stopping; Ctrl-C again stops at once")
        worker_grace = self._settings.drain_seconds + self._timing.worker_margin
        for group, grace in ((self._workers, worker_grace), ([self._engine], self._timing.engine_grace)):
            for child in group:
                child.terminate()
            if not self._await_end(group, grace):
                return INTERRUPTED
        return outcome

    def _await_end(self, group: Iterable[Child], grace: float) -> bool:
        """Waits for processes told to end, and kills what is left after `grace` seconds. False: interrupted."""
        deadline = monotonic() + grace
        while running := {child.process.sentinel: child for child in group if child.process is not None}:
            happened = wait([self._signals, *running], timeout=max(0.0, deadline - monotonic()))
            if self._signals in happened and signal.SIGINT in self._signals.recv(64):
                return False
            for sentinel, child in running.items():
                if sentinel in happened:
                    child.reap()
                elif not happened:
                    log.warning("%s did not end in %.0f s and is killed", child.name, grace)
                    child.kill()
        return True


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[socket.socket]:
    """A socket that gets a byte, the signal's number, for each SIGINT and SIGTERM: something `wait` can wait for."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started within never see a SIGINT: Ctrl-C goes to all of them, but is the supervisor's to answer."""
    resource_tracker.ensure_running()  # started by the first process otherwise, and that unblocks SIGINT (3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A directory for the Unix socket: only this user's, and short enough for the socket's address."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmux-"))
        if len(os.fsencode(directory)) + len("/engine.sock") > MAX_SOCKET_PATH:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmux-", dir="/tmp"))
        yield directory
