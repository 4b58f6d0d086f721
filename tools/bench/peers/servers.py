"""Starts servers for a benchmark, waits until they are ready, and ends them with all their processes."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from server.profiling.running import RunError
from server.version import get_version
from tools.bench.peers.install import (
    LLAMA_CPP,
    LLAMA_CPP_VERSION,
    VLLM,
    VLLM_VERSION,
    Installer,
    convert_model,
    install_llama_cpp,
    install_vllm,
)

START_TIMEOUT = 600.0  # seconds; vLLM compiles its model when it is started for the first time
STOP_TIMEOUT = 30.0  # seconds that a server may take to end after SIGTERM before it is killed
POLL_INTERVAL = 0.2
KV_GIB = 2  # memory for keys and values of servers that have such a setting
LOG_CHARACTERS = 1000  # last characters of a server's output that an error message has
TCMALLOC = "libtcmalloc_minimal.so.4"  # vLLM advises to load it before its own libraries
LIBRARY_FOLDERS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


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

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that all processes of the server have used so far."""
        return sum(sum(each.cpu_times()[:2]) for each in list_family(self.process))


# -------------------------------------------------------------------- the servers
def prepare_kvmux(model: Path) -> ServerProgram:
    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        flags = ["--model", str(model), "--kv-memory", f"{KV_GIB}GiB", "--max-seq-len", str(needs.tokens)]
        seats = ["--max-num-seqs", str(needs.streams), "--port", str(port), "--log-level", "warning"]
        return StartCommand([sys.executable, "-m", "server", "serve", *flags, *seats])

    return ServerProgram("kvmux", f"kvmux {get_version()}", "/ready", make_command)


def prepare_llama_cpp(model: Path, installer: Installer) -> ServerProgram:
    """Return llama.cpp's server, installed if it is not there, with the model converted. Raises InstallError."""
    installer.ensure(install_llama_cpp, LLAMA_CPP_VERSION)
    file, threads = convert_model(installer, model), str(os.cpu_count() or 1)

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        program = str(installer.folder / "build" / "bin" / "llama-server")
        # Each stream has a share of the context: a common one (-kvu) would let each attend over the keys of all.
        size = ["-np", str(needs.streams), "-c", str(needs.streams * needs.tokens), "-t", threads, "-tb", threads]
        # Prompts come once each, so a store of earlier ones (up to 8 GiB) would only be filled.
        store = ["--cache-ram", "0", "--host", "127.0.0.1", "--port", str(port)]
        return StartCommand([program, "-m", str(file), *size, *store])

    version = f"llama.cpp of {LLAMA_CPP} {LLAMA_CPP_VERSION}"
    return ServerProgram("llama.cpp", version, "/health", make_command, start_for_each_workload=True)


def prepare_vllm(model: Path, installer: Installer) -> ServerProgram:
    """Return vLLM's server, installed if it is not there. Raises InstallError."""
    installer.ensure(install_vllm, VLLM_VERSION)
    venv = installer.folder / "venv"
    preloaded = [str(each) for each in (find_tcmalloc(), venv / "lib" / "libiomp5.so") if each and each.exists()]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def make_command(needs: ServerNeeds, port: int) -> StartCommand:
        flags = ["--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", str(needs.tokens)]
        seats = ["--max-num-seqs", str(needs.streams), "--host", "127.0.0.1", "--port", str(port)]
        return StartCommand([str(venv / "bin" / "vllm"), "serve", str(model), *flags, *seats], environment)

    return ServerProgram("vLLM", f"{VLLM} {VLLM_VERSION}", "/health", make_command)


def find_tcmalloc() -> Path | None:
    """Return the path of tcmalloc if the machine has it."""
    found = (file for folder in LIBRARY_FOLDERS for file in folder.glob(f"**/{TCMALLOC}"))
    return next(found, None)


# -------------------------------------------------------------------- running one
@contextmanager
def run_program(program: ServerProgram, needs: ServerNeeds) -> Iterator[StartedServer]:
    """Run a server until the block ends. Raises RunError if it does not become ready."""
    port = find_free_port()
    command = program.make_command(needs, port)
    with tempfile.TemporaryDirectory() as folder, (log := Path(folder) / "log").open("w") as output:
        process = subprocess.Popen(
            command.arguments,
            env={**os.environ, **command.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(program, process, url + program.ready_path, log)
            yield StartedServer(url, psutil.Process(process.pid))
        finally:
            end_family(process)


def find_free_port() -> int:
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
