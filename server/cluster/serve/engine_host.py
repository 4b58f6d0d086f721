"""A process that keeps an engine running for a replica: the supervisor of `kvmux serve` without API workers.

`EngineHost` starts it as `python -m server.cluster.serve.engine_host` and writes the pickled settings to its stdin.
Once the engine is ready, the process writes one line of JSON to its stdout: the summary, with the path of the engine's
socket. It ends when its stdin is closed, as when the replica's process is killed. Knows neither Ray nor requests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

from config.errors import SettingsError
from config.settings import Settings
from server.logs import configure_logging
from server.processes.supervisor import Supervisor

STOP_TIMEOUT = 20.0  # seconds that the process may take to end before it is killed
# Variables that Ray sets for its workers, which would override the settings or slow the engine down
NOT_INHERITED = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT")


class EngineHost:
    """The process, as the replica sees it."""

    def __init__(self, settings: Settings) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        self.summary: dict[str, Any] = {}  # of the engine, once it is ready
        # In a session of its own, so that Ctrl-C in a terminal reaches only the process that started Ray
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        pickle.dump(settings, self._process.stdin)
        self._process.stdin.flush()

    def wait_until_ready(self) -> str:
        """Wait for the engine; return the path of its socket. Raises SettingsError if it cannot start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SettingsError(f"the engine did not start (exit code {code}); the log of this replica has the cause")
        self.summary = json.loads(line)
        return str(self.summary.pop("socket_path"))

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Let the engine end, and wait for it; kill the process after STOP_TIMEOUT."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---------------------------------------------------------------- the process
def main() -> int:
    """Run the supervisor until stdin is closed; return the exit code."""
    settings: Settings = pickle.load(sys.stdin.buffer)
    multiprocessing.current_process().name = "kvmux"  # in the log
    configure_logging(settings)
    threading.Thread(target=_stop_at_end_of_input, name="parent-watch", daemon=True).start()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what children print must not mix with the line for the parent

    def announce(summary: dict[str, Any]) -> None:
        print(json.dumps({**summary, "socket_path": supervisor.socket_path}), file=out, flush=True)

    supervisor = Supervisor(settings, None, announce)
    return supervisor.run()


def _stop_at_end_of_input() -> None:
    """Send this process SIGTERM, as an operator would stop a server, once its stdin is closed."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
