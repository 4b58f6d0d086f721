"""Keeps one engine and the API workers running, and stops them in order.

    starting -> serving            the engine's {"ready": ...}
    starting -> stopping           its {"error": ...} or any child's SettingsError: exit code 2; any other death: 1
    serving  -> stopping           SIGTERM, SIGHUP or SIGINT: 0; workers first, then the engine

A child that dies while serving is started again, later and later while it keeps dying; one whose heartbeat stands still
for watchdog_timeout seconds is killed, and started again. Knows neither models nor HTTP, and imports neither torch nor
transformers: the children are named by import strings.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import monotonic
from typing import Any

from config.settings import Settings
from server.listening import url_of
from server.processes.child import USUAL, Child, Timing
from server.processes.child_process import SUPERVISOR_SIGNALS, USER_ERROR, run_child, signals_blocked, stacks_file
from server.processes.heartbeat import EngineStatus, Heartbeat, Recovery, Watchdog, WorkerTies
from server.processes.runtime_directory import runtime_directory
from server.processes.served_files import ServedFiles

log = logging.getLogger(__name__)

STOPPED, DIED, REFUSED, INTERRUPTED = 0, 1, USER_ERROR, 130  # exit codes
LOOKS = 8  # at the heartbeats, within watchdog_timeout
LONGEST_PAUSE = 1.0  # seconds between two looks


@dataclass(frozen=True)
class Targets:
    """What the children run, as "package.module:function"."""

    engine: str = "server.processes.engine:run"  # (settings, socket_path, status, restarts)
    worker: str = "server.api.worker:serve_worker"  # (settings, socket_path, listening_socket, ties)


class Supervisor:
    """Runs until a signal stops it. `announce` is called once with the engine's summary, when it first is ready."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        announce: Callable[[dict[str, Any]], None],
        *,
        metrics_listener: socket.socket | None = None,
        targets: Targets = Targets(),
        timing: Timing = USUAL,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._metrics_listener = metrics_listener
        self._announce = announce
        self._targets = targets
        self._timing = timing
        self._spawn_context = multiprocessing.get_context("spawn")
        self._socket_path = ""  # this and _signals are set by run()
        self._signals: socket.socket
        self._files: ServedFiles  # that the engine maps; set whenever it is started
        self._status: Connection | None = None  # the engine sends {"ready": ...} or {"error": ...}
        self._serving = False
        self._outcome: int | None = None  # exit code, once it is time to stop
        self._engines = 0  # started so far
        self._pause = min(LONGEST_PAUSE, settings.watchdog_timeout / LOOKS)
        self._recovery = Recovery(self._spawn_context)
        self._engine = Child("engine", self._start_engine, timing)
        self._workers = [Child(f"worker-{i}", self._start_worker, timing) for i in range(settings.workers)]

    def run(self) -> int:
        """Run all processes until it is time to stop; return the exit code. Call it in the main thread (signals)."""
        with runtime_directory(url_of(self._listener)) as directory, _signals_as_bytes() as self._signals:
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
    def _start_engine(self, name: str) -> tuple[SpawnProcess, Watchdog]:
        Path(self._socket_path).unlink(missing_ok=True)  # a killed engine leaves it behind
        self._status, theirs = self._spawn_context.Pipe(duplex=False)
        self._recovery.begin(monotonic())
        heartbeat = Heartbeat(self._spawn_context)
        self._files = ServedFiles(Path(self._settings.model))
        if self._settings.weights not in ("int8", "int4"):  # which may lie in the folder of quantized weights
            threading.Thread(target=self._files.read_ahead, name="read-ahead", daemon=True).start()
        with theirs:
            status = EngineStatus(theirs, heartbeat)
            process = self._spawn(name, self._targets.engine, heartbeat, status, self._engines)
        self._engines += 1
        return process, Watchdog(heartbeat, self._pause)

    def _start_worker(self, name: str) -> tuple[SpawnProcess, Watchdog]:
        heartbeat = Heartbeat(self._spawn_context)
        ties = WorkerTies(heartbeat, self._recovery, self._metrics_listener)
        process = self._spawn(name, self._targets.worker, heartbeat, self._listener, ties)
        return process, Watchdog(heartbeat, self._pause)

    def _spawn(self, name: str, target: str, heartbeat: Heartbeat, *rest: object) -> SpawnProcess:
        args = (target, self._settings, self._socket_path, heartbeat, *rest)
        process = self._spawn_context.Process(target=run_child, args=args, name=name, daemon=True)
        with signals_blocked():
            process.start()
        return process

    # ------------------------------------------------------------ running
    def _step(self) -> None:
        """Wait for something to happen, and deal with it."""
        happened = wait(self._awaited(), timeout=self._seconds_to_wait())
        if self._signals in happened:
            self._signals.recv(64)
            self._outcome = STOPPED
            return
        if self._status in happened:  # before its death: the last message explains it
            self._hear_engine()
        for child in self._children():
            if child.process is None:
                if child.due <= monotonic():
                    self._start_again(child)
            elif child.process.sentinel in happened:
                self._on_death(child)
            elif (silent := child.silent()) >= self._settings.watchdog_timeout:
                why, *stacks = child.kill_stuck(stacks_file(self._socket_path, child.name))
                log.error("%s gave no sign of life for %.0f s and is killed; %s", child.name, silent, why)
                for line in stacks:
                    log.error("%s: %s", child.name, line)
        self._recovery.look()

    def _start_again(self, child: Child) -> None:
        """Start a child that has died; where the system refuses, the others go on and it is tried again later."""
        try:
            child.start()
        except OSError as error:  # no processes, no descriptors, no memory
            again = child.postpone()
            log.error("%s cannot be started again (%s); it is tried again in %.1f s", child.name, error, again)
            if child is self._engine:
                self._recovery.begin(child.due)

    def _awaited(self) -> list[Any]:
        sentinels = [child.process.sentinel for child in self._children() if child.process is not None]
        return [self._signals, *sentinels, *([self._status] if self._status else [])]

    def _seconds_to_wait(self) -> float:
        """Return the seconds until a child is due, or it is time to look at the heartbeats."""
        due = [child.due for child in self._children() if child.process is None]
        return min(self._pause, max(0.0, min(due) - monotonic())) if due else self._pause

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
        self._recovery.end()
        if self._serving:
            log.warning("the engine is ready again")
        else:
            self._serving = True
            self._announce(summary)

    def _on_death(self, child: Child) -> None:
        exitcode, how = child.reap()
        if self._outcome is not None:
            return
        if child is self._engine and (why := self._files.explain(exitcode)):
            log.error("%s", why)
        if self._serving:
            log.error("%s ended: %s; it is started again in %.1f s", child.name, how, child.postpone())
            if child is self._engine:
                self._recovery.begin(child.due)
        elif exitcode == USER_ERROR:  # it has said why
            self._outcome = REFUSED
        else:
            log.error("%s ended before the server was ready: %s; its messages are above", child.name, how)
            self._outcome = DIED

    # ------------------------------------------------------------ stopping
    def _stop(self, outcome: int) -> int:
        """Stop the workers, then the engine, which their requests need; return the exit code."""
        self._listener.close()
        if self._metrics_listener is not None:
            self._metrics_listener.close()
        if outcome == STOPPED:
            log.info("stopping; Ctrl-C again stops at once")
        worker_grace = self._settings.drain_seconds + self._timing.worker_margin
        for group, grace in ((self._workers, worker_grace), ([self._engine], self._timing.engine_grace)):
            for child in group:
                child.end()
            if not self._await_end(group, grace):
                return INTERRUPTED
        return outcome

    def _await_end(self, group: Iterable[Child], grace: float) -> bool:
        """Wait for processes to end, and kill those left after `grace` seconds; return False after SIGINT."""
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
    """Yield a socket that gets a byte, its number, for each of SUPERVISOR_SIGNALS: something `wait` can wait for.

    A SIGHUP that is ignored already, as under nohup, stays ignored.
    """
    numbers = SUPERVISOR_SIGNALS - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set())
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
