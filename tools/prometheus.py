"""Runs a real Prometheus that scrapes one server, and asks it for values.

`make prometheus` unpacks Debian's package on Debian and Ubuntu; elsewhere `prometheus` has to be on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.server_process import RunError

UNPACKED = Path(__file__).parent.parent / ".tools" / "usr" / "bin"
TIMEOUT = 30.0  # seconds for what takes one on an idle machine

Labels = dict[str, str]


def find_tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`. Raises RunError if this machine has none."""
    found = shutil.which(name, path=f"{UNPACKED}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise RunError(f"no {name}: `make prometheus` unpacks it on Debian and Ubuntu; elsewhere install Prometheus")
    return found


class PromQLError(Exception):
    """Prometheus refused a query; the message has its answer."""


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, through its HTTP API."""

    client: httpx.Client
    moment: float | None = None  # the time that queries are for; None: now

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return values with their labels. Raises PromQLError with Prometheus' message if it is not PromQL."""
        when = {} if self.moment is None else {"time": str(self.moment)}
        result = self._get("query", query=expression, **when)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def value(self, expression: str) -> float:
        """Return the only value of a query."""
        ((_, value),) = self.query(expression)
        return value

    def rules(self) -> list[dict[str, Any]]:
        """Return the recording rules and alerts, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises RunError after TIMEOUT."""
        end = time.monotonic() + TIMEOUT
        while not until():
            if time.monotonic() > end:
                raise RunError(f"timed out after {TIMEOUT:g} s waiting for {what}")
            time.sleep(0.1)

    def wait_for_scrapes(self, number: int) -> None:
        """Wait until it has scraped the metrics `number` times more."""
        before = self._scrapes()
        self.wait(lambda: self._scrapes() >= before + number, "scrapes")

    def _scrapes(self) -> float:
        return sum(value for _, value in self.query("sum_over_time(up[1h])"))

    def _get(self, what: str, **parameters: str) -> Any:
        answer = self.client.get(f"/api/v1/{what}", params=parameters).json()
        if answer["status"] != "success":
            raise PromQLError(f"{answer['error']}: {parameters}")
        return answer["data"]


def make_config(target: str, interval: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration that scrapes `target` (host:port) each `interval`; the rest is as in `given`."""
    config: dict[str, Any] = dict(given or {"scrape_configs": [{"job_name": "kvmux"}]})
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    first, *others = config["scrape_configs"]
    config["scrape_configs"] = [first | {"static_configs": [{"targets": [target]}]}, *others]
    return config


@contextmanager
def run_prometheus(folder: Path, config: Mapping[str, Any], flags: Sequence[str] = ()) -> Iterator[Prometheus]:
    """Run a Prometheus whose data, configuration and log are in `folder` until the block ends. Raises RunError."""
    program, log = find_tool("prometheus"), folder / "log"
    # JSON is YAML, too
    (folder / "prometheus.yml").write_text(json.dumps(dict(config)))
    files = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as output:
        process = subprocess.Popen([program, *files, "--web.listen-address=127.0.0.1:0", *flags], stderr=output)
    try:
        url = f"http://{_wait_for_address(process, log)}"
        with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the host and port of a Prometheus, once it is ready."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text()
        address = re.search(r'"?Listening on"? address=(\S+)', text)
        if address and "ready to receive web requests" in text:
            return address[1]
        time.sleep(0.05)
    raise RunError(f"Prometheus did not start:\n{log.read_text()}")
