"""The server under test: starts `kvmux serve` in its own session, finds its processes by role, and reads its log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx
import psutil

from tools.torture.requests import TENANTS

ROOT = Path(__file__).parents[2]
WORKERS = 2
DRAIN_SECONDS = 30.0
ADMIN_TOKEN = "token-of-the-operator"
START_SECONDS = 120.0  # within which a server must be ready
POLL_SECONDS = 0.02  # between two checks of a state
WATCHDOG_SECONDS = 10.0
CRASH_PATTERN = re.compile(r'"exception": |Traceback \(most recent call last\)|Fatal Python error|terminate called')

# Little memory, so that requests are preempted, and small steps, so that prompts are split.
CONFIG = f"""
model = "tiny"
dtype = "float32"
threads = 1
workers = {WORKERS}
max_seq_len = 512
max_num_seqs = 8
max_num_batched_tokens = 64
kv_memory = "4MiB"
kv_overcommit = 4
drain_seconds = {DRAIN_SECONDS}
admin_token = "{ADMIN_TOKEN}"
api_keys = {json.dumps(TENANTS)}
log_format = "json"
watchdog_timeout = {WATCHDOG_SECONDS}
max_kv_cache_priority = 100

[strategies.small_blocks]
kind = "paged"
block_size = 8
eviction = "s3fifo"

[strategies.window]
kind = "sliding_window"
window = 48
max_row = 16

[strategies.int8]
kind = "paged"
kv_dtype = "int8"
"""


class StartError(Exception):
    """Raised when the server did not start; the message ends with its last output."""


@dataclass(frozen=True)
class Roles:
    """The descendants of the supervisor by role."""

    engine: psutil.Process | None
    workers: Sequence[psutil.Process]
    helpers: Sequence[psutil.Process]  # children of engine and workers

    @property
    def complete(self) -> bool:
        return self.engine is not None and len(self.workers) == WORKERS


class ServerProcess:
    """A server that can be started and stopped many times. Call `remove` at the end."""

    def __init__(self, *, deterministic: bool, max_queued_requests: int) -> None:
        self.up = asyncio.Event()  # set while a server runs that has been ready
        self.url = ""
        self.starts = 0
        self._folder = Path(tempfile.mkdtemp(prefix="torture-"))
        self._config = self._folder / "kvmux.toml"
        self._config.write_text(
            f"deterministic = {str(deterministic).lower()}\nmax_queued_requests = {max_queued_requests}\n{CONFIG}"
        )
        self._temporary = self._folder / "tmp"  # the server's TMPDIR
        self._temporary.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------ starting and ending
    async def start(self) -> float:
        """Start the server and return the seconds until it was ready. Raises StartError."""
        assert self._process is None or self._process.poll() is not None, "the server is already running"
        began = monotonic()
        self.starts += 1
        command = [sys.executable, "-m", "server", "serve", "--config", str(self._config), "--port", "0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**_make_environment(), "TMPDIR": str(self._temporary)},
                start_new_session=True,
                preexec_fn=_restore_sighup,
            )
        self.url = await self._wait_for_address(began + START_SECONDS)
        self.up.set()
        return monotonic() - began

    async def _wait_for_address(self, deadline: float) -> str:
        while monotonic() < deadline and self.exit_code is None:
            if (found := re.search(r'"url": "([^"]+)"', self._log.read_text())) and await is_ready(found[1]):
                return found[1]
            await asyncio.sleep(POLL_SECONDS)
        self.kill()
        raise StartError(f"the server did not start:\n{self._log.read_text()[-4000:]}")

    async def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the supervisor's end; return its exit code, or None if it still runs."""
        deadline = monotonic() + seconds
        while self.exit_code is None and monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if self.exit_code is not None:
            self.up.clear()
        return self.exit_code

    async def stop(self) -> int | None:
        """Stop the server with SIGTERM, and kill it if it does not end; return its exit code, None if killed."""
        self.send_signal(signal.SIGTERM)
        code = await self.wait(2 * DRAIN_SECONDS)
        self.kill()
        return code

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the supervisor, or to its whole process group."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def kill(self) -> None:
        """Kill every process of the server; do nothing if it has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.up.clear()

    def remove(self) -> None:
        """Kill the server and remove its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    # ------------------------------------------------------------ state
    def find_processes(self) -> list[psutil.Process]:
        """Return the supervisor, then all its descendants."""
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self._process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []

    def find_roles(self) -> Roles:
        """Return the processes by role, except those that are starting or ending, and Python's resource tracker."""
        family = self.find_processes()
        children = [each for each in family[1:] if _parent_pid(each) == family[0].pid]
        engines = [each for each in children if _has_engine_socket(each)]
        workers = [each for each in children if _is_listening(each)]
        holders = {each.pid for each in (*engines, *workers)}
        helpers = [each for each in family[1:] if _parent_pid(each) in holders and not _is_resource_tracker(each)]
        return Roles(engines[0] if engines else None, workers, helpers)

    def find_socket_folders(self) -> set[str]:
        """Return the names of the socket folders that exist: those of ended servers should have been removed."""
        return {each.name for each in self._temporary.glob("kvmux-*") if each.is_dir()}

    def remove_socket_folder(self, name: str) -> None:
        shutil.rmtree(self._temporary / name, ignore_errors=True)

    def find_crashes(self) -> Iterator[str]:
        """Yield every line of all logs that has a traceback or a native crash."""
        for log in sorted(self._folder.glob("log-*")):
            for line in log.read_text(errors="replace").splitlines():
                if CRASH_PATTERN.search(line):
                    yield line

    @property
    def _log(self) -> Path:
        return self._folder / f"log-{self.starts:03d}"


async def is_ready(url: str) -> bool:
    """Return whether GET /ready succeeds on a new connection."""
    try:
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
            return (await http.get(f"{url}/ready")).status_code == 200
    except httpx.TransportError:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _make_environment() -> dict[str, str]:
    """Return the environment without the server's settings (KVMUX_...)."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("KVMUX_")}


def _restore_sighup() -> None:
    """Restore the default action of SIGHUP, which is ignored in processes started under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _parent_pid(process: psutil.Process) -> int | None:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether this is Python's resource tracker, also for a process that has just ended."""
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return True


def _has_engine_socket(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(str(each.laddr).endswith("engine.sock") for each in process.net_connections("unix"))
    return False


def _is_listening(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp"))
    return False
