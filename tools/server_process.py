"""Runs programs of the project as users start them, each in a process of its own. Measures nothing.

`kvmux serve` runs until a `with` block ends, the other programs until they have printed their results.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

URL_PATTERN = re.compile(r"serves .* on (http://[^\s\"]+)")
START_TIMEOUT = 300.0  # seconds that a server may take to become ready
TERMINATE_TIMEOUT = 10.0  # seconds that a process may take to end after SIGTERM before it gets another
POLL_INTERVAL = 0.01


class RunError(Exception):
    """A server or a benchmark client, run as a process, failed; the message has its output."""


@dataclass(frozen=True)
class RunningServer:
    """The process of a `kvmux serve` that is ready for requests; `run_server` starts it and ends it."""

    url: str
    process: psutil.Process
    ready_seconds: float  # seconds from the start of the process until it was ready for requests
    log: Path  # what it prints and logs; the file is removed when the server has ended

    @property
    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all processes of the server have used so far."""
        return sum(sum(each.cpu_times()[:2]) for each in self.processes)

    def peak_bytes(self) -> int | None:
        """Return the sum of the peak memory of each process, in bytes; None if the system does not report it."""
        try:
            return sum(_read_peak_memory(each.pid) for each in self.processes)
        except OSError:
            return None


def _read_peak_memory(pid: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt in the main thread within the block, so that `with` blocks clean up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def start_process(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process by Popen(command, **how); end it when the block ends, even if its start is interrupted."""
    this, process = psutil.Process(), None
    before = this.children()
    try:
        process = subprocess.Popen(command, **how)
        yield process
    finally:
        left = [child for child in this.children() if child not in before]
        while left:  # repeat: a process that is forked but has not yet loaded its program ignores SIGTERM
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.terminate()  # SIGTERM and not SIGKILL: the process may have children that it must end
            _, left = psutil.wait_procs(left, timeout=TERMINATE_TIMEOUT)
        if process is not None:
            with process:  # closes its pipes
                pass


@contextmanager
def run_server(flags: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """Run `kvmux serve` with these flags on a free port until the block ends. Raises RunError if it does not start.

    `env` are its environment variables; None: those of this process.
    """
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
    with tempfile.TemporaryDirectory() as folder, (said := Path(folder) / "log").open("w") as log:
        began = time.monotonic()
        with start_process(command, stdout=log, stderr=subprocess.STDOUT, env=env) as process:
            url = wait_until_ready(process, said, began + START_TIMEOUT)
            yield RunningServer(url, psutil.Process(process.pid), time.monotonic() - began, said)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Wait until the server is ready for requests; return its URL. Raises RunError if it ends or the time is up."""
    while time.monotonic() < deadline and process.poll() is None:
        if (found := URL_PATTERN.search(log.read_text())) and is_ready(found[1]):
            return found[1]
        time.sleep(POLL_INTERVAL)
    raise RunError(f"kvmux serve did not become ready; its output:\n{log.read_text()[-4000:]}")


def is_ready(url: str) -> bool:
    """Return whether GET /ready succeeds on a new connection."""
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def run_bench(url: str, flags: Sequence[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """Return the results of `kvmux bench`, one for each workload, phase and strategy.

    Raises RunError if it fails or takes more than `timeout` seconds.
    """
    report = json.loads(run_module("server", "bench", "--url", url, "--json", "-", *flags, timeout=timeout))
    results: list[dict[str, Any]] = report["results"]
    return results


def run_module(module: str, *flags: str, timeout: float | None = None) -> str:
    """Return the standard output of `python -m module`.

    Raises RunError if its exit code is not 0, or if it takes more than `timeout` seconds.
    """
    command = [sys.executable, "-m", module, *flags]
    pipe = subprocess.PIPE
    with start_process(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said, complained = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RunError(f"python -m {module} took more than {timeout:g} seconds") from None
    if process.returncode:
        raise RunError(f"python -m {module} {' '.join(flags)} failed:\n{complained}")
    return str(said)
