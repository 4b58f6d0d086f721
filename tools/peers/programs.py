"""Starts servers for a measurement, waits until they are ready, and ends them with all their processes."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tools.server_process import RunError

START_TIMEOUT = 600.0  # seconds; vLLM compiles its model when it is started for the first time
STOP_TIMEOUT = 30.0  # seconds that a server may take to end after SIGTERM before it is killed
POLL_INTERVAL = 0.05
LOG_CHARACTERS = 1000  # last characters of a server's output that an error message has


@dataclass(frozen=True)
class ServerNeeds:
    """What a server is started for: streams at a time, and tokens of a stream's prompt and answer together."""

    streams: int
    tokens: int


@dataclass(frozen=True)
class StartCommand:
    """A command that starts a server, with additional environment variables."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # in which it runs; None: in that of this process

    def describe(self) -> str:
        """Return the command as text, in which folders of this machine and the address are left out."""
        shown = [f"{name}={Path(value).name if '/' in value else value}" for name, value in self.environment.items()]
        words = [Path(word).name if word.startswith("/") else word for word in self.arguments]
        return " ".join([*shown, shlex.join(words)])


@dataclass(frozen=True)
class ServerProgram:
    """A server that can be measured."""

    name: str
    version: str
    ready_path: str  # answers 200 once the server is ready
    make_command: Callable[[ServerNeeds, int], StartCommand]  # for a port
    # Whether its speed with few streams suffers if it is started for more: then each workload has a start of its own.
    start_for_each_workload: bool = False


@dataclass(frozen=True)
class StartedServer:
    """A server that is ready for requests."""

    url: str
    process: psutil.Process
    ready_seconds: float  # from the start of the process until it was ready

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all processes of the server have used so far."""
        return sum(sum(each.cpu_times()[:2]) for each in list_family(self.process))


@contextmanager
def run_program(program: ServerProgram, needs: ServerNeeds) -> Iterator[StartedServer]:
    """Run a server until the block ends. Raises RunError if it does not become ready."""
    port = find_free_port()
    command = program.make_command(needs, port)
    with tempfile.TemporaryDirectory() as folder, (log := Path(folder) / "log").open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command.arguments,
            cwd=command.folder,
            env={**os.environ, **command.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(program, process, url + program.ready_path, log)
            yield StartedServer(url, psutil.Process(process.pid), time.monotonic() - began)
        finally:
            end_family(process)


def find_free_port() -> int:
    """Return the number of a port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(program: ServerProgram, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False, timeout=10.0).status_code == 200:
                return
        time.sleep(POLL_INTERVAL)
    said = log.read_text(errors="replace")[-LOG_CHARACTERS:]
    raise RunError(f"{program.name} did not become ready; the end of its output:\n{said}")


def list_family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a server by SIGTERM; kill what is left of its processes after STOP_TIMEOUT."""
    family = list_family(psutil.Process(process.pid)) if process.poll() is None else []
    if family:
        process.terminate()
    _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    with suppress(ProcessLookupError):  # processes that were started meanwhile are in the server's group, too
        os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(left, timeout=STOP_TIMEOUT)
    process.wait()
