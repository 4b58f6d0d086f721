"""Stand-ins for the engine and the API worker, which print what happens to them.

Which of them run is an argument of `python -m tests.processes.fake_children`, which is a supervisor around them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from config.errors import SettingsError
from config.settings import Settings
from server.cli.banner import format_banner
from server.engine.calls import NUM_CODES
from server.listening import get_url, listen
from server.logs import configure_logging
from server.processes.child import Timing
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import StrategyCalls
from server.processes.supervisor import Supervisor, Targets
from tests.processes.forked_children import FORK

READY = {
    "model": "tiny",
    "device": "cpu",
    "state_bytes": 0,
    "weight_formats": {"bfloat16": {"parameters": 3_000_000, "nbytes": 6_000_000}},
    "dtype": "float32",
    "kernels": "cpu-avx512",
    "kv_memory_bytes": 512 * 1024 * 1024,
    "max_seq_len": 2048,
    "strategies": [
        {"name": "paged", "kind": "paged", "options": {"block_size": 16}, "capacity_tokens": 131072},
        {
            "name": "short",
            "kind": "sliding_window",
            "options": {"window": 256, "max_row": None},
            "capacity_tokens": 99000,
        },
    ],
}


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write: lines of several processes stay whole


def enter(calls: StrategyCalls, instance: str, method: str) -> None:
    """Record a new call of a strategy's method."""
    calls.running[0] = time.monotonic_ns() // 1000 * NUM_CODES + calls.encode_methods(instance)[method]


def run_until_told(name: str, beat: Callable[[], None] = lambda: None) -> None:
    """Print that the process runs, and beat; on STOP_SIGNAL print that it ends, and return."""
    told = threading.Event()
    signal.signal(STOP_SIGNAL, lambda *_: told.set())
    beat()
    say(f"{name} {os.getpid()} runs")
    while not told.wait(0.05):
        beat()
    say(f"{name} ends")


def engine(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Run a healthy engine."""
    status.send({"ready": READY})
    run_until_told("engine", status.beat)


def engine_refusing(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    status.send({"error": f"there is no model in {settings.model}"})
    run_until_told("engine")


def engine_loading(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Run, but never report that the engine is ready."""
    run_until_told("engine")


def engine_crashing(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    sys.exit(3)


def engine_telling_its_socket(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Print whether there is a file at the socket's path, then leave one there."""
    say(f"socket {socket_path} {os.path.exists(socket_path)}")
    with open(socket_path, "w"):
        pass
    engine(settings, socket_path, status, restarts)


def engine_hanging(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Hang after the first heartbeat in the first process; be healthy in later ones."""
    if restarts:
        return engine(settings, socket_path, status, restarts)
    status.send({"ready": READY})
    status.beat()
    say(f"engine {os.getpid()} runs")
    hang_in_a_loop()


def engine_in_a_call(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Beat, but never return from a strategy's locate() in the first process; print what later ones must not use."""
    say(f"without {status.disabled}")
    if not restarts:
        enter(status.calls, "short", "locate")
    engine(settings, socket_path, status, restarts)


def engine_stopped_in_a_call(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Stop in a strategy's locate() in the first process; print what later ones must not use."""
    say(f"without {status.disabled}")
    if not restarts:
        status.send({"ready": READY})
        status.beat()
        enter(status.calls, "short", "locate")
        os.kill(os.getpid(), signal.SIGSTOP)
    engine(settings, socket_path, status, restarts)


def engine_always_in_a_call(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Beat, but never return from a call of the first strategy that is not disabled."""
    name = next(name for name in settings.strategies if name not in status.disabled)
    say(f"without {[*status.disabled]}")
    enter(status.calls, name, "attend")
    engine(settings, socket_path, status, restarts)


def engine_in_short_calls(settings: Settings, socket_path: str, status: Any, restarts: int) -> None:
    """Call a strategy again and again, for longer than strategy_timeout in all."""
    status.send({"ready": READY})

    def beat() -> None:
        for _ in range(2):
            enter(status.calls, "short", "schedule")
        status.calls.running[0] = 0
        status.beat()

    run_until_told("engine", beat)


def hang_in_a_loop() -> None:
    while True:
        pass


def worker(settings: Settings, socket_path: str, listener: Any, ties: Any) -> None:
    """Run a healthy worker, and check that it has the listening socket."""
    assert listener.getsockname()[1] > 0
    run_until_told("worker", ties.heartbeat.beat)


def worker_loading(settings: Settings, socket_path: str, listener: Any, ties: Any) -> None:
    """Run without a heartbeat."""
    run_until_told("worker")


def worker_crashing(settings: Settings, socket_path: str, listener: Any, ties: Any) -> None:
    sys.exit(4)


def worker_refusing(settings: Settings, socket_path: str, listener: Any, ties: Any) -> None:
    raise SettingsError(f"there is no tokenizer in {settings.model}")


def worker_deaf(settings: Settings, socket_path: str, listener: Any, ties: Any) -> None:
    """Run until SIGKILL."""
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    say(f"worker {os.getpid()} runs")
    while True:
        signal.pause()


def supervise(engine_name: str, worker_name: str, workers: int, worker_grace: float, watchdog: float) -> int:
    settings = Settings(
        workers=workers,
        port=0,
        drain_seconds=worker_grace,
        watchdog_timeout=watchdog,
        strategy_timeout=1.0,
        strategies={"paged": {"kind": "paged"}, "short": {"kind": "sliding_window"}},
    )
    configure_logging(settings)
    targets = Targets(f"tests.processes.fake_children:{engine_name}", f"tests.processes.fake_children:{worker_name}")
    timing = Timing(min_restart_delay=0.01, max_restart_delay=0.05, worker_margin=0.0)
    with listen("127.0.0.1", 0) as listener:
        url = get_url(listener)

        def announce(ready: dict[str, Any]) -> None:
            print(format_banner(url, settings, ready), flush=True)
            say("announced")

        return Supervisor(settings, listener, announce, targets=targets, timing=timing, context=FORK).run()


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
