"""The supervisor: keeps one engine and the API workers running, and stops them in order.

    starting -> serving     when the engine sends {"ready": ...}
    starting -> stopping    when the engine sends {"error": ...} or a child ends with a SettingsError (exit code 2), or
                            when a child ends otherwise (exit code 1)
    any      -> stopping    on SIGTERM, SIGHUP or SIGINT (exit code 0); the workers end first, then the engine

A child that dies while serving is restarted, with growing delays while it keeps dying; a child whose heartbeat stops
for watchdog_timeout seconds is killed and restarted. If the engine does not return from a call of a strategy for
strategy_timeout seconds, it is killed, and restarted without that instance. Imports neither torch nor transformers: the
children's code is named by import strings.
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
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

from config.settings import Settings
from server.listening import get_url
from server.processes.child import DEFAULT_TIMING, Child, Timing
from server.processes.child_process import SUPERVISOR_SIGNALS, USER_ERROR, block_signals, run_child, stacks_file
from server.processes.heartbeat import (
    EngineStatus,
    Heartbeat,
    Recovery,
    StrategyCalls,
    Watchdog,
    WorkerHandles,
)
from server.processes.read_ahead import read_ahead
from server.processes.runtime_directory import runtime_directory
from server.rollouts.start import needs_controller

log = logging.getLogger(__name__)

SPAWN = multiprocessing.get_context("spawn")
STOPPED, DIED, REFUSED, INTERRUPTED = 0, 1, USER_ERROR, 130  # exit codes
CHECKS_PER_TIMEOUT = 8  # number of checks of the heartbeats within watchdog_timeout
MAX_CHECK_INTERVAL = 1.0  # maximum number of seconds between two checks of the heartbeats
SIGBUS_MESSAGE = (
    "SIGBUS means that a model's file could not be read: it was truncated, or its disk fails; files must not change "
    "while they are served: write a new file and rename it over the old one"
)


@dataclass(frozen=True)
class Targets:
    """The functions that the children run, as "package.module:function"."""

    engine: str = "server.processes.engine:run"  # called with (settings, socket_path, status, restarts)
    worker: str = "server.api.worker:serve_worker"  # called with (settings, socket_path, listening_socket, handles)
    rollouts: str = "server.rollouts.process:run"  # called with (settings, socket_path, heartbeat)


class Supervisor:
    """The parent of all processes of a server.

    `announce` is called once, when the engine is ready for the first time, with the summary that it has sent. Without a
    `listener` there are no API workers, but only the engine, at `socket_path`. `context` starts the children.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket | None,
        announce: Callable[[dict[str, Any]], None],
        *,
        metrics_listener: socket.socket | None = None,
        targets: Targets = Targets(),
        timing: Timing = DEFAULT_TIMING,
        context: SpawnContext | ForkContext = SPAWN,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._metrics_listener = metrics_listener
        self._announce = announce
        self._targets = targets
        self._timing = timing
        self._context = context
        self.socket_path = ""  # path of the engine's socket; run() sets it and _signals
        self._signals: socket.socket
        self._status_pipe: Connection | None = None  # pipe on which the engine sends {"ready": ...} or {"error": ...}
        self._serving = False
        self._exit_code: int | None = None  # exit code of the server; set when it has to stop
        self._num_engine_starts = 0
        shortest_timeout = min(settings.watchdog_timeout, settings.strategy_timeout)
        self._check_interval = min(MAX_CHECK_INTERVAL, shortest_timeout / CHECKS_PER_TIMEOUT)
        self._recovery = Recovery(self._context)
        self._calls: StrategyCalls | None = None  # of the running engine
        self._disabled: dict[str, str] = {}  # strategy instances that engines must not use any more, with the reasons
        self._engine = Child("engine", self._start_engine, timing)
        num_workers = 0 if listener is None else settings.workers
        self._workers = [Child(f"worker-{i}", self._start_worker, timing) for i in range(num_workers)]
        self._rollouts = [self._make_controller()] if needs_controller(settings) else []

    def run(self) -> int:
        """Run all processes until it is time to stop; return the exit code. Call it in the main thread, for signals."""
        url = None if self._listener is None else get_url(self._listener)
        with runtime_directory(url) as directory, _open_signal_socket() as self._signals:
            self.socket_path = os.path.join(directory, "engine.sock")
            try:
                for child in self._children():
                    child.start()
                while self._exit_code is None:
                    self._step()
                return self._stop(self._exit_code)
            finally:
                for child in self._children():
                    child.kill()

    def _children(self) -> list[Child]:
        return [self._engine, *self._workers, *self._rollouts]

    def _make_controller(self) -> Child:
        """Return the controller of roll-outs, which runs if there are some from the start, or once the engine asks."""
        return Child("rollouts", self._start_rollouts, self._timing)

    # ------------------------------------------------------------ starting
    def _start_engine(self, name: str) -> tuple[BaseProcess, Watchdog]:
        Path(self.socket_path).unlink(missing_ok=True)  # a killed engine leaves its socket behind
        self._status_pipe, theirs = self._context.Pipe(duplex=False)
        self._recovery.record_start(monotonic())
        heartbeat = Heartbeat(self._context)
        # Read the files ahead unless weights are int8 or int4: those may come from the cache of quantized weights.
        if self._settings.weights not in ("int8", "int4"):
            threading.Thread(
                target=read_ahead, args=(Path(self._settings.model),), name="read-ahead", daemon=True
            ).start()
        with theirs:
            self._calls = StrategyCalls(self._context, list(self._settings.strategies))
            status = EngineStatus(theirs, heartbeat, self._calls, self._disabled, has_rollouts=bool(self._rollouts))
            process = self._spawn(name, self._targets.engine, heartbeat, status, self._num_engine_starts)
        self._num_engine_starts += 1
        return process, Watchdog(heartbeat, self._check_interval)

    def _start_worker(self, name: str) -> tuple[BaseProcess, Watchdog]:
        heartbeat = Heartbeat(self._context)
        ties = WorkerHandles(heartbeat, self._recovery, self._metrics_listener)
        process = self._spawn(name, self._targets.worker, heartbeat, self._listener, ties)
        return process, Watchdog(heartbeat, self._check_interval)

    def _start_rollouts(self, name: str) -> tuple[BaseProcess, Watchdog]:
        heartbeat = Heartbeat(self._context)
        return self._spawn(name, self._targets.rollouts, heartbeat, heartbeat), Watchdog(
            heartbeat, self._check_interval
        )

    def _spawn(self, name: str, target: str, heartbeat: Heartbeat, *rest: object) -> BaseProcess:
        args = (target, self._settings, self.socket_path, heartbeat, *rest)
        process = self._context.Process(target=run_child, args=args, name=name, daemon=True)
        with block_signals():
            process.start()
        return process

    # ------------------------------------------------------------ running
    def _step(self) -> None:
        """Wait for a signal, a message, the end of a child or the next check of the heartbeats, and handle it."""
        happened = wait(self._list_waitables(), timeout=self._compute_wait_timeout())
        if self._signals in happened:
            self._signals.recv(64)
            self._exit_code = STOPPED
            return
        # read the engine's message before its end is handled: its last message says why it ends
        if self._status_pipe in happened:
            self._read_engine_message()
        for child in self._children():
            if child.process is None:
                if child.start_at <= monotonic():
                    self._restart(child)
            elif child.process.sentinel in happened:
                self._on_death(child)
            elif (silent := child.measure_silence()) >= self._settings.watchdog_timeout:
                why, *stacks = child.kill_stuck(stacks_file(self.socket_path, child.name))
                log.error("%s had no heartbeat for %.0f s and is killed; %s", child.name, silent, why)
                for line in stacks:
                    log.error("%s: %s", child.name, line)
            elif child is self._engine:
                self._check_strategy_calls()
        self._recovery.extend_if_late()

    def _check_strategy_calls(self) -> None:
        """Kill the engine if a strategy's call does not return, and note that the next engine must not use it.

        An engine that is stopped (SIGSTOP, a debugger) is not the strategy's fault: the watchdog alone deals with it.
        """
        assert self._calls is not None
        stuck = self._calls.find_stuck(self._settings.strategy_timeout, self._check_interval)
        if stuck is None or self._engine.kill_reason:
            return
        if self._engine.is_stopped():
            self._calls.restart_timer()
            return
        instance, method, seconds = stuck
        log.error("cache strategy %r: %s() did not return for %.1f s; the engine is killed", instance, method, seconds)
        reason = f"cache strategy {instance!r} did not return from {method}()"
        _, *stacks = self._engine.kill_stuck(stacks_file(self.socket_path, self._engine.name), reason)
        for line in stacks:
            log.error("%s: %s", self._engine.name, line)
        others = set(self._settings.strategies) - {*self._disabled, instance}
        if others:
            self._disabled[instance] = f"{method}() did not return for {seconds:.1f} seconds"
            log.error("cache strategy %r is disabled until the server is started again; fix it, or remove it", instance)
        else:
            log.error("no other strategy is left, so %r is not disabled", instance)

    def _restart(self, child: Child) -> None:
        """Start a child that has died; if the system cannot start it, try later, while the other children go on."""
        try:
            child.start()
        except OSError as error:  # the system has no processes, descriptors or memory left
            again = child.schedule_restart()
            log.error("%s cannot be restarted (%s); trying again in %.1f s", child.name, error, again)
            if child is self._engine:
                self._recovery.record_start(child.start_at)

    def _list_waitables(self) -> list[Any]:
        sentinels = [child.process.sentinel for child in self._children() if child.process is not None]
        return [self._signals, *sentinels, *([self._status_pipe] if self._status_pipe else [])]

    def _compute_wait_timeout(self) -> float:
        """Return the seconds until a child is due to start, or until the next check of the heartbeats."""
        due = [child.start_at for child in self._children() if child.process is None]
        return min(self._check_interval, max(0.0, min(due) - monotonic())) if due else self._check_interval

    def _read_engine_message(self) -> None:
        assert self._status_pipe is not None
        try:
            message = self._status_pipe.recv()
        except (EOFError, OSError):  # the engine has ended, which closes the pipe; _on_death handles its end
            self._status_pipe.close()
            self._status_pipe = None
            return
        if "ready" in message:
            self._on_ready(message["ready"])
        elif "needs" in message:
            if not self._rollouts:
                self._rollouts = [self._make_controller()]
                self._restart(self._rollouts[0])
        elif self._serving:
            log.error("the engine cannot restart: %s", message["error"])
        else:
            log.error("cannot start: %s", message["error"])
            self._exit_code = REFUSED

    def _on_ready(self, summary: dict[str, Any]) -> None:
        self._recovery.record_ready()
        if self._serving:
            log.warning("the engine is ready again")
        else:
            self._serving = True
            self._announce(summary)

    def _on_death(self, child: Child) -> None:
        exitcode, how = child.reap()
        if self._exit_code is not None:
            return
        if child is self._engine and exitcode == -signal.SIGBUS:
            log.error(SIGBUS_MESSAGE)
        if self._serving:
            log.error("%s ended: %s; it is restarted in %.1f s", child.name, how, child.schedule_restart())
            if child is self._engine:
                self._recovery.record_start(child.start_at)
        elif exitcode == USER_ERROR:  # the child has logged why it cannot start
            self._exit_code = REFUSED
        else:
            log.error("%s ended before the server was ready: %s; see its messages above", child.name, how)
            self._exit_code = DIED

    # ------------------------------------------------------------ stopping
    def _stop(self, outcome: int) -> int:
        """Stop the workers, then the engine, which the workers' requests need until then; return the exit code.

        The controller of roll-outs ends last, as it counts the last requests; it is asked before the engine, so that
        it expects the engine's end.
        """
        for listener in (self._listener, self._metrics_listener):
            if listener is not None:
                listener.close()
        if outcome == STOPPED:
            log.info("stopping, once running requests have finished; Ctrl-C again stops at once")
        worker_grace = self._settings.drain_seconds + self._timing.worker_margin
        engine_grace = self._timing.engine_grace
        for asked, group, grace in (
            (self._workers, self._workers, worker_grace),
            ([*self._rollouts, self._engine], [self._engine], engine_grace),
            ([], self._rollouts, engine_grace),
        ):
            for child in asked:
                child.request_stop()
            if not self._wait_for_exit(group, grace):
                return INTERRUPTED
        return outcome

    def _wait_for_exit(self, group: Iterable[Child], grace: float) -> bool:
        """Wait for processes to end; kill those left after `grace` seconds. Return False as soon as SIGINT arrives."""
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
def _open_signal_socket() -> Iterator[socket.socket]:
    """Yield a socket on which each of SUPERVISOR_SIGNALS arrives as a byte, so that `wait` can wait for signals, too.

    The byte is the number of the signal. A SIGHUP that is ignored already, as under nohup, stays ignored.
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
