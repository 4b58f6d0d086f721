"""State that the supervisor and its children share while they run: heartbeats, and when the engine is expected back.

It consists of numbers in shared memory: writing one takes a tenth of a microsecond and wakes no process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from time import monotonic, sleep
from typing import Any, NamedTuple

from server.engine.calls import NUM_CODES

BOOT_SECONDS = 20.0  # extra seconds for the first heartbeat of a process: Python starts and imports the settings
LOADING_BEAT_INTERVAL = 0.25  # seconds between two heartbeats of a process that is still loading


class Heartbeat:
    """Two shared counters that a child increments: one while it loads, the other while it works or waits for work."""

    def __init__(self, context: BaseContext) -> None:
        self._loading: Any = context.RawValue("Q", 0)
        self._serving: Any = context.RawValue("Q", 0)

    def beat_while_loading(self) -> None:
        """Start a thread that beats until the first call of `beat`.

        These beats show that the process is not stopped and that no thread keeps the GIL; loading has no time limit.
        """

        def run() -> None:
            while not self._serving.value:
                self._loading.value += 1
                sleep(LOADING_BEAT_INTERVAL)

        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def beat(self) -> None:
        self._serving.value += 1

    @property
    def serving_beats(self) -> int:
        """Return the number of beats since the child finished loading."""
        return int(self._serving.value)

    @property
    def total_beats(self) -> int:
        """Return the number of all beats, while loading and since then."""
        return int(self._loading.value) + self.serving_beats


class CheckTimer:
    """Measures the seconds between the supervisor's checks of a child.

    A pause of more than two intervals counts as two: while the supervisor did not run, as on a suspended machine, the
    child may not have run either.
    """

    def __init__(self) -> None:
        self._checked_at = monotonic()

    def measure(self, interval: float) -> float:
        """Return the seconds since the last call, of calls every `interval` seconds."""
        now = monotonic()
        passed, self._checked_at = min(now - self._checked_at, 2 * interval), now
        return passed


class Watchdog:
    """A timer of the seconds since a child's latest heartbeat; for the first one a child has BOOT_SECONDS more.

    Call `check_heartbeat` every `interval` seconds.
    """

    def __init__(self, heartbeat: Heartbeat, interval: float) -> None:
        self.silent_seconds = -BOOT_SECONDS  # seconds since the latest beat; negative while the process boots
        self.uptime = 0.0  # seconds from the first beat after loading to the latest beat
        self._heartbeat = heartbeat
        self._interval = interval
        self._count = 0
        self._was_serving = False  # whether the child had finished loading at the latest beat seen
        self._timer = CheckTimer()

    def check_heartbeat(self) -> None:
        count = self._heartbeat.total_beats
        self.silent_seconds += self._timer.measure(self._interval)
        if count != self._count:
            if self._was_serving:
                self.uptime += self.silent_seconds
            self.silent_seconds, self._count, self._was_serving = 0.0, count, self._heartbeat.serving_beats > 0


class Recovery:
    """An estimate of when the engine will serve (again). The supervisor writes it, API processes read it."""

    def __init__(self, context: BaseContext) -> None:
        # time.monotonic() at which the engine is expected to serve; 0 while it serves
        self._expected_at: Any = context.RawValue("d", 0.0)
        self._start_seconds: Any = context.RawValue("d", 0.0)  # seconds that the latest start of an engine took
        self._started_at = 0.0

    # ------------------------------------------------------------ the supervisor
    def record_start(self, start: float) -> None:
        """Note that an engine starts at `start`, a value of time.monotonic() that may lie in the future."""
        self._started_at = start
        self._expected_at.value = start + self._start_seconds.value

    def extend_if_late(self) -> None:
        """Move the expected time of an engine that is late: expect it to take as long again as it has taken so far."""
        now = monotonic()
        if 0 < self._expected_at.value < now:
            self._expected_at.value = now + (now - self._started_at)

    def record_ready(self) -> None:
        """Note that the engine serves now, and how long its start took."""
        self._start_seconds.value = monotonic() - self._started_at
        self._expected_at.value = 0.0

    # ------------------------------------------------------------ an API process
    def estimate_seconds(self) -> float:
        """Return the seconds until the engine is expected to serve; while it serves, the seconds that a start takes."""
        expected: float = self._expected_at.value
        return max(0.0, expected - monotonic()) if expected else float(self._start_seconds.value)


SCHEDULING = "ready or reserve"  # the methods that are called while a row is scheduled


class StuckCall(NamedTuple):
    """A call of a strategy that has not returned for long."""

    instance: str
    method: str
    seconds: float  # since the supervisor first saw the call


class StrategyCalls:
    """The strategy's method that the engine's thread is in: the engine writes it, the supervisor reads it.

    If a call never returns, the engine cannot say so itself. Implements `CallObserver` of engine/calls.py.
    """

    # Of KVCache, of its sequences and of optional protocols. schedule stands for ready, reserve and fields;
    # estimate_bytes is sizes, called for a report
    METHODS = (
        *("__init__", "open", "schedule", "fork", "close", "sizes"),
        *("idle_bytes", "evict", "pinned_blocks", "poll", "locate", "attend", "commit", "compact"),
        *("estimate_bytes", "usage", "blocks", "count_visible", "budget", "collect_block_events"),
        *("clear", "pin", "pin_prefix", "unpin", "pins", "drop_prefix", "list_prefixes"),
        *("block_naming", "list_block_names"),
        *("inspect", "mark_blocks", "describe_block"),
    )

    def __init__(self, context: BaseContext, instances: Sequence[str]) -> None:
        self._instances = list(instances)
        self.running: Any = context.RawArray("Q", 1)  # in shared memory
        self._seen, self._seconds = 0, 0.0  # in the supervisor: the latest value, and for how long it has been seen
        self._timer = CheckTimer()

    # ------------------------------------------------------------ the engine
    def encode_methods(self, instance: str) -> Mapping[str, int]:
        """Return a code for each method of an instance."""
        first = 1 + self._instances.index(instance) * len(self.METHODS)
        return {method: first + i for i, method in enumerate(self.METHODS)}

    # ------------------------------------------------------------ the supervisor
    def find_stuck(self, timeout: float, interval: float) -> StuckCall | None:
        """Return the running call if this process has seen it for `timeout` seconds; call this every `interval`."""
        running, passed = self.running[0], self._timer.measure(interval)
        self._seconds = self._seconds + passed if running == self._seen else 0.0
        self._seen, code = running, running % NUM_CODES
        if not code or self._seconds < timeout:
            return None
        instance, method = divmod(code - 1, len(self.METHODS))
        name = self.METHODS[method]
        return StuckCall(self._instances[instance], SCHEDULING if name == "schedule" else name, self._seconds)

    def restart_timer(self) -> None:
        """Measure the time of the running call anew, as the engine could not go on until now."""
        self._seconds = 0.0


class EngineStatus:
    """An engine's means to tell its supervisor {"ready": summary} or {"error": message}, and to send heartbeats.

    {"needs": "rollouts"} asks for the controller of roll-outs.
    """

    def __init__(
        self,
        pipe: Connection,
        heartbeat: Heartbeat,
        calls: StrategyCalls | None = None,
        disabled: Mapping[str, str] | None = None,
        *,
        has_rollouts: bool = False,
    ) -> None:
        """`disabled`: strategy instances that the engine must not use, with the reasons.

        `has_rollouts`: whether there is a controller of roll-outs, which tells the engine how to divide requests.
        """
        self._pipe = pipe
        self._heartbeat = heartbeat
        self.calls = calls
        self.disabled = dict(disabled or {})
        self.has_rollouts = has_rollouts

    def send(self, message: dict[str, Any]) -> None:
        self._pipe.send(message)

    def beat(self) -> None:
        self._heartbeat.beat()


@dataclass(frozen=True)
class WorkerHandles:
    """The objects that an API process shares with its supervisor, besides its settings."""

    heartbeat: Heartbeat
    recovery: Recovery
    metrics_socket: socket.socket | None = None  # listens for /metrics alone; None: /metrics is on the main port
