"""Starts `kvmux serve` in processes of its own, and looks at them from outside."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from server.engine.ipc.messages import ANSWER_TTL
from server.processes.supervisor import Targets
from tests.end_to_end.server_template import ServerRequest
from tests.patience import PATIENCE, eventually

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: psutil.Process
    output: Path  # what it has printed and logged

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)

    def complete(self, **body: object) -> httpx.Response:
        return self.post("/v1/completions", **{"model": self.model} | body)

    @property
    def model(self) -> str:
        return str(self.get("/v1/models").json()["data"][0]["id"])

    def metrics(self) -> str:
        """Return the text of /metrics, of a snapshot that is younger than this call.

        What is up to a second old comes first; the response that brought it is counted in the next snapshot.
        """
        old = responses = _responses(self.get("/metrics").text)
        while responses == old:
            text = self.get("/metrics").text
            responses = _responses(text)
        return text

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name that have these labels, now.

        Takes up to a second, as metrics() does: read several numbers from one text of it.
        """
        return metric(self.metrics(), name, **labels)

    def usage(self, instance: str) -> dict[str, int]:
        """Return an instance's usage as it is now."""
        return self.usages()[instance]

    def usages(self) -> dict[str, dict[str, int]]:
        """Return the usage of each instance as it is now: an answer from before this call has expired."""
        time.sleep(ANSWER_TTL)
        return {entry["name"]: dict(entry["usage"]) for entry in self.get("/v1/kv_cache").json()["data"]}

    @property
    def engine(self) -> psutil.Process:
        """The process that computes: there must be exactly one."""
        [engine] = [child for child in self.process.children() if child.name() == "kvmux-engine"]
        return engine


def metric(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of that name that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _responses(metrics: str) -> str:
    """Return the number of 200s that the server has counted."""
    found = re.search(r'^kvmux_http_responses_total{code="200"} (.*)$', metrics, re.MULTILINE)
    assert found, metrics
    return found[1]


def maps(process: psutil.Process, library: str) -> bool:
    """Return whether the process has that library in its memory."""
    try:
        return any(library in region.path for region in process.memory_maps())
    except psutil.NoSuchProcess:
        return False


@contextmanager
def serving(*flags: str, targets: Targets | None = None, anew: bool = False) -> Iterator[Server]:
    """Run `kvmux serve` on a free port until the block ends; its log is shown if the block raises.

    It is forked by a process that has imported everything (server_template.py) or, with `anew`, started as users do.
    """
    with tempfile.TemporaryFile("w+") as output:
        arguments = ["serve", "--port", "0", *flags]
        process = start(arguments, output) if anew else _get_template().fork(arguments, targets or Targets(), output)
        try:
            printed = Path(f"/proc/self/fd/{output.fileno()}")
            yield Server(_address(process, printed), process, printed)
        except BaseException:
            print(printed.read_text())
            raise
        finally:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
            process.wait(PATIENCE)


def start(arguments: Sequence[str], output: IO[str]) -> psutil.Process:
    """Start the program as a shell does."""
    command = [sys.executable, "-m", "server", *arguments]
    return psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)


class Template:
    """A process that forks servers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.end_to_end.server_template", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        self._asking = threading.Lock()

    def fork(self, arguments: Sequence[str], targets: Targets, output: IO[str]) -> psutil.Process:
        request = ServerRequest(arguments, dict(os.environ), targets.engine, targets.worker)
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output.fileno()])
            return psutil.Process(int(self._socket.recv(100)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _get_template() -> Template:
    """Start the template when it is needed first."""
    template = Template()
    atexit.register(template.close)
    return template


def _address(process: psutil.Process, printed: Path) -> str:
    """Return the address that the server prints when it is ready."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if found := re.search(r'serves .* on (http://[^\s"]+)', printed.read_text()):
            eventually(lambda: httpx.get(f"{found[1]}/ready", timeout=PATIENCE).status_code == 200)
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"the server did not come up:\n{printed.read_text()}")
