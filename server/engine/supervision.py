"""What the supervisor and its children share while they run: heartbeats, and when the engine is expected back.

Both are numbers in shared memory: writing one takes a tenth of a microsecond and wakes no process. Knows neither
processes nor what they do.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from time import monotonic
from typing import Any


class Heartbeat:
    """A counter that a child raises again and again while it works or waits for work."""

    def __init__(self, context: SpawnContext) -> None:
        self._count: Any = context.RawValue("Q", 0)

    def beat(self) -> None:
        self._count.value += 1

    @property
    def count(self) -> int:
        return int(self._count.value)


class Watchdog:
    """Measures how long a child's heartbeat has stood still, from the first beat on: loading may take any time.

    `look` is to be called every `interval` seconds. A longer pause between two looks counts as two intervals: while
    the supervisor did not run, as in a suspended or frozen machine, the child may not have run either.
    """

    def __init__(self, heartbeat: Heartbeat, interval: float) -> None:
        self.silent = 0.0  # seconds since the latest beat
        self.lived = 0.0  # seconds from the first beat to the latest
        self._heartbeat = heartbeat
        self._interval = interval
        self._count = 0
        self._looked = monotonic()

    def look(self) -> None:
        now, count = monotonic(), self._heartbeat.count
        passed, self._looked = min(now - self._looked, 2 * self._interval), now
        if count == 0:
            return
        self.silent += passed
        if count != self._count:
            self.lived, self.silent, self._count = self.lived + self.silent, 0.0, count


class Recovery:
    """Estimates when the engine will serve (again). The supervisor writes it, API processes read it."""

    def __init__(self, context: SpawnContext) -> None:
        self._expected: Any = context.RawValue("d", 0.0)  # monotonic seconds; 0: it serves
        self._takes: Any = context.RawValue("d", 0.0)  # seconds from the latest start of an engine until it served
        self._began = 0.0

    # ------------------------------------------------------------ the supervisor
    def begin(self, start: float) -> None:
        """Note that an engine starts at `start`, which may lie in the future."""
        self._began = start
        self._expected.value = start + self._takes.value

    def look(self) -> None:
        """Move the expected time of an engine that is late: it is given as long again as it has taken so far."""
        now = monotonic()
        if 0 < self._expected.value < now:
            self._expected.value = now + (now - self._began)

    def end(self) -> None:
        """Note that the engine serves."""
        self._takes.value = monotonic() - self._began
        self._expected.value = 0.0

    # ------------------------------------------------------------ an API process
    def seconds(self) -> float:
        """Return the seconds until the engine is expected; while it serves, those that a start takes."""
        expected: float = self._expected.value
        return max(0.0, expected - monotonic()) if expected else float(self._takes.value)


class EngineStatus:
    """An engine's way to its supervisor: {"ready": summary} or {"error": what to change}, and heartbeats."""

    def __init__(self, pipe: Connection, heartbeat: Heartbeat) -> None:
        self._pipe = pipe
        self._heartbeat = heartbeat

    def send(self, message: dict[str, Any]) -> None:
        self._pipe.send(message)

    def beat(self) -> None:
        self._heartbeat.beat()


@dataclass(frozen=True)
class WorkerTies:
    """What an API process gets from its supervisor besides its settings."""

    heartbeat: Heartbeat
    recovery: Recovery
    metrics_socket: socket.socket | None = None  # listening, for /metrics alone; None: it is on the main port
