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

import psutil

from tools.server_process import RunError, wait_until_ready
from tools.torture.requests import TENANTS

ROOT = Path(__file__).parents[2]
WORKERS = 2
DRAIN_SECONDS = 30.0
ADMIN_TOKEN = "token-of-the-operator"
START_SECONDS = 120.0  # within which a server must be ready
CRASH_PATTERN = re.compile(r'"exception": |Traceback \(most recent call last\)|Fatal Python error|terminate called')

# Little memory, so that requests are preempted, and small steps, so that prompts are split. `deterministic` makes
# answers equal bit for bit, whatever else runs.
CONFIG = f"""
model = "tiny"
dtype = "float32"
deterministic = true
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
watchdog_timeout = 10
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
k_dtype = "int8"
v_dtype = "int8"
"""


@dataclass(frozen=True)
class Roles:
    """The descendants of the supervisor by role."""

    engines: Sequence[psutil.Process]  # one, except while it is replaced
    workers: Sequence[psutil.Process]
    helpers: Sequence[psutil.Process]  # children of engine and workers

    @property
    def complete(self) -> bool:
        return bool(self.engines) and len(self.workers) == WORKERS


class ServerProcess:
    """A server that can be started and stopped many times. Call `remove` at the end."""

    def __init__(self, max_queued_requests: int) -> None:
        self.url = ""  # of the latest start
        self.starts = 0
        self._folder = Path(tempfile.mkdtemp(prefix="torture-"))
        self._config = self._folder / "kvmux.toml"
        self._config.write_text(f"max_queued_requests = {max_queued_requests}\n{CONFIG}")
        self._temporary = self._folder / "tmp"  # the server's TMPDIR
        self._temporary.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------ starting and ending
    async def start(self) -> None:
        """Start the server. Raises RunError."""
        assert self._process is None or self._process.poll() is not None, "the server is already running"
        self.starts += 1
        command = [sys.executable, "-m", "server", "serve", "--config", str(self._config), "--port", "0"]
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVMUX_")}
        log = self._folder / f"log-{self.starts:03d}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**environment, "TMPDIR": str(self._temporary)},
                start_new_session=True,
                preexec_fn=_restore_sighup,
            )
        try:
            self.url = await asyncio.to_thread(wait_until_ready, self._process, log, monotonic() + START_SECONDS)
        except RunError:
            self.kill()
            raise

    async def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the supervisor's end; return its exit code, or None if it still runs."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, seconds)
        return self.exit_code

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the supervisor, or to its whole process group."""
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def kill(self) -> None:
        """Kill every process of the server; do nothing if it has ended."""
        if self._process is not None:
            self.send_signal(signal.SIGKILL, group=True)
            self._process.wait()

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
        engines, workers, others = [], [], []
        for process in self.find_processes()[1:]:
            with suppress(psutil.Error):  # it has just ended
                if any(str(each.laddr).endswith("engine.sock") for each in process.net_connections("unix")):
                    engines.append(process)
                elif any(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp")):
                    workers.append(process)
                elif not any("resource_tracker" in word for word in process.cmdline()):
                    others.append((process, process.ppid()))
        parents = {each.pid for each in (*engines, *workers)}
        return Roles(engines, workers, [process for process, parent in others if parent in parents])

    def find_socket_folders(self) -> set[Path]:
        """Return the socket folders that exist: those of ended servers should have been removed."""
        return {each for each in self._temporary.glob("kvmux-*") if each.is_dir()}

    def find_crashes(self) -> Iterator[str]:
        """Yield every line of all logs that has a traceback or a native crash."""
        for log in sorted(self._folder.glob("log-*")):
            yield from filter(CRASH_PATTERN.search, log.read_text(errors="replace").splitlines())


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _restore_sighup() -> None:
    """Restore the default action of SIGHUP, which is ignored in processes started under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
