"""Runs a server, or several replicas on Ray Serve, until they are no longer measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from server.listening import listen
from tools.bench.replicas.stream import TIMEOUT
from tools.server_process import RunError, start_process

START_TIMEOUT = 120.0  # seconds that a server or a cluster may take to become ready
SETTLE = 3.0  # seconds between two rounds, in which replicas report and routers forget
COMMON = ("--threads", "1", "--max-num-seqs", "16", "--log-level", "warning", "--admin-token", "bench-token")
ADMIN = {"authorization": "Bearer bench-token"}


@contextmanager
def serving(python: str, *arguments: str) -> Iterator[str]:
    """Run a command of kvmux until the block ends; yield its URL once it is ready."""
    with listen("127.0.0.1", 0) as probe:
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "server", *arguments, "--port", str(port), *COMMON]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd()}
    with start_process(command, env=environment, stdout=sys.stderr) as process:
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_ready(url, arguments):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"{' '.join(command)} did not become ready")
            time.sleep(0.2)
        time.sleep(SETTLE)
        yield url


def _is_ready(url: str, arguments: Sequence[str]) -> bool:
    try:
        if httpx.get(f"{url}/ready").status_code != 200:
            return False
        if arguments[0] != "ray":
            return True
        wanted = int(arguments[arguments.index("--replicas") + 1])
        return len(list_replicas(url)) == wanted
    except httpx.TransportError:
        return False


def list_replicas(url: str) -> list[str]:
    """Return the ids of the replicas that are ready."""
    return [each["id"] for each in httpx.get(f"{url}/v1/replicas").json()["data"] if each["ready"]]


def clear(url: str) -> None:
    """Remove all cached blocks, and wait until routers know it."""
    httpx.post(f"{url}/v1/kv_cache/paged/clear", headers=ADMIN, timeout=TIMEOUT).raise_for_status()
    time.sleep(SETTLE + 2.0)
