"""A child process as its supervisor sees it: when it has to start, whether it is alive, and how it ended.

Does not know what the process does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic

import psutil

from server.processes import child_process
from server.processes.heartbeat import Watchdog

STACK_DUMP_TIMEOUT = 2.0  # seconds that a hanging process has to write its stack traces to a file


@dataclass(frozen=True)
class Timing:
    """Delays and time limits for restarting and stopping child processes, in seconds."""

    min_restart_delay: float = 0.5  # seconds before a dead child is started again; doubles each time it dies again
    max_restart_delay: float = 30.0
    healthy_after: float = 60.0  # seconds of serving after which a child's delay is min_restart_delay again
    # a worker is killed drain_seconds plus this many seconds after it was asked to stop; time for its last messages
    worker_margin: float = 5.0
    engine_grace: float = 10.0  # seconds after which an engine that was asked to stop is killed


DEFAULT_TIMING = Timing()


class Child:
    """A process that should be running; `start` is a function that starts it and returns it with its watchdog."""

    def __init__(self, name: str, start: Callable[[str], tuple[BaseProcess, Watchdog]], timing: Timing) -> None:
        self.name = name
        self.process: BaseProcess | None = None
        self.start_at = 0.0  # time.monotonic() at which to start the process, if it is not running
        self.watchdog: Watchdog | None = None  # watchdog of the running process, or of the latest one
        self.kill_reason = ""  # why the process was killed, if it was, because it did not go on
        self._start = start
        self._timing = timing
        self._delay = 0.0

    def start(self) -> None:
        """Start the process. Raises OSError if the system cannot create it, for lack of memory for example."""
        self.watchdog = None  # forget the previous process: its uptime must not count if this start fails
        self.process, self.watchdog = self._start(self.name)
        self.kill_reason = ""

    def measure_silence(self) -> float:
        """Return the seconds since the latest heartbeat; 0 for a child that is not running."""
        if self.process is None or self.watchdog is None or self.kill_reason:
            return 0.0
        self.watchdog.check_heartbeat()
        return self.watchdog.silent_seconds

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP or a debugger."""
        assert self.process is not None, self.name
        assert self.process.pid is not None, self.name
        try:
            return _is_stopped(psutil.Process(self.process.pid))
        except psutil.Error:  # it has just ended
            return False

    def reap(self) -> tuple[int | None, str]:
        """Clean up after a process that has ended; return its exit code and a description of how it ended."""
        assert self.process is not None, self.name
        self.process.join()
        exitcode = self.process.exitcode
        self.process.close()
        self.process = None
        return exitcode, f"killed, as {self.kill_reason}" if self.kill_reason else describe_exit(exitcode)

    def schedule_restart(self) -> float:
        """Set when to start the dead process again; return the delay in seconds, which doubles while it keeps dying."""
        timing = self._timing
        healthy = self.watchdog is not None and self.watchdog.uptime >= timing.healthy_after
        self._delay = timing.min_restart_delay if healthy else max(timing.min_restart_delay, 2 * self._delay)
        self._delay = min(self._delay, timing.max_restart_delay)
        self.start_at = monotonic() + self._delay
        return self._delay

    def request_stop(self) -> None:
        """Send the process the signal to finish its work and end; do nothing if it is not running."""
        if self.process is not None:
            child_process.request_stop(self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.reap()

    def kill_stuck(self, stacks: Path, reason: str = "its heartbeat had stopped") -> list[str]:
        """Kill a process that does not go on, for a `reason`; return lines to log: what it did, then stack traces."""
        assert self.process is not None, self.name
        assert self.process.pid is not None, self.name
        why = _explain_silence(self.process.pid, stacks)
        self.process.kill()
        self.kill_reason = reason
        return why


def describe_exit(exitcode: int | None) -> str:
    """Return in words how a process ended: its exit code, or the signal that killed it."""
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"killed by {name}" + (" (by the system, if memory ran out)" if name == "SIGKILL" else "")


def _is_stopped(process: psutil.Process) -> bool:
    return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _explain_silence(pid: int, stacks: Path) -> list[str]:
    try:
        process = psutil.Process(pid)
        if _is_stopped(process):
            return ["it was stopped, by SIGSTOP or a debugger"]
        process.send_signal(child_process.DUMP_SIGNAL)
        lines = _read_stacks(stacks)
    except psutil.Error:
        return ["it has just ended"]
    except OSError:  # its stack traces cannot be read: no descriptors are free, or the file was removed
        lines = []
    return ["its threads were here:", *lines] if lines else ["it did not write where its threads were"]


def _read_stacks(stacks: Path) -> list[str]:
    """Return the lines of a file of stack traces once it no longer grows; [] if it grows for STACK_DUMP_TIMEOUT."""
    text, end = "", monotonic() + STACK_DUMP_TIMEOUT
    while monotonic() < end:
        time.sleep(0.05)
        before, text = text, stacks.read_text(errors="replace")
        if text and text == before:
            return [line for line in text.splitlines() if line]
    return []
