"""Runs `kvmux ray up` with a real Ray, in processes of its own, and observes them from outside, by HTTP and psutil."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from server.listening import listen
from tests.end_to_end.server_process import PATIENCE, eventually, metric

PYTHON_VARIABLE = "RAY_PYTHON"  # the Python that has Ray; tests/cluster/run.py sets it
ROOT = Path(__file__).parents[2]
SMALL = ("--threads", "1", "--dtype", "float32", "--log-level", "info")


@dataclass(frozen=True)
class Cluster:
    """A running `kvmux ray up`."""

    url: str
    process: subprocess.Popen[bytes]
    output: Path  # what it has printed and logged
    environment: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, headers=headers)

    def get_json(self, path: str) -> Any:
        response = self.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **body: object) -> Any:
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        assert response.status_code == 200, response.text
        return response.json()

    def list_replicas(self) -> list[str]:
        """Return the ids of the replicas that are ready."""
        return [each["id"] for each in self.get_json("/v1/replicas")["data"] if each["ready"]]

    def wait_for_replicas(self, count: int) -> list[str]:
        eventually(lambda: len(self.list_replicas()) == count)
        return self.list_replicas()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name that have these labels; they are up to a second old."""
        return metric(self.get("/metrics").text, name, **labels)

    def find_replica_process(self, replica: str) -> psutil.Process:
        """Return the process of Ray that is a replica, by the lines that it has logged."""
        found = re.findall(rf"pid=(\d+)\).* replica {replica}: connected", self.output.read_text())
        return psutil.Process(int(found[-1]))

    def find_api_process(self) -> int:
        """Return the number of the latest API process."""
        found = re.findall(r"ServeReplica:kvmux:ingress pid=(\d+)\)", self.output.read_text())
        return int(found[-1])

    def find_engine(self, replica: str) -> psutil.Process:
        """Return the process of a replica's engine."""
        children = self.find_replica_process(replica).children(recursive=True)
        engines = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
        return max(engines, key=psutil.Process.create_time)

    def update(self, num_replicas: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `kvmux ray up` against this cluster: an update of what runs there, one replica after the other."""
        command = [get_python(), "-m", "server", "ray", "up", "--address", "auto", "--replicas", str(num_replicas)]
        command += [*arguments, "--port", self.url.rpartition(":")[2]]
        patience = PATIENCE * num_replicas
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=patience)


def get_python() -> str:
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def find_free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def make_environment() -> dict[str, str]:
    """Return the environment of Ray's processes, which import this checkout; Ray's own variables are not inherited."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST"))}
    return kept | {"PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled"}


@contextmanager
def running(*flags: str) -> Iterator[Cluster]:
    """Run `kvmux ray up` until the block ends; its log is shown if the block raises."""
    port, environment = find_free_port(), make_environment()
    command = [get_python(), "-m", "server", "ray", "up", "--port", str(port), *SMALL, *flags]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        printed = Path(f"/proc/self/fd/{output.fileno()}")
        try:
            _wait_until_serving(process, printed)
            yield Cluster(f"http://127.0.0.1:{port}", process, printed, environment)
        except BaseException:
            print(printed.read_text())
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)


def _wait_until_serving(process: subprocess.Popen[bytes], printed: Path) -> None:
    """Wait until the cluster says that it serves."""
    deadline = time.monotonic() + PATIENCE
    while " serves " not in printed.read_text():
        assert process.poll() is None, "`kvmux ray up` has ended"
        assert time.monotonic() < deadline, "`kvmux ray up` does not serve yet"
        time.sleep(0.1)
