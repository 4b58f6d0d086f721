"""A real Prometheus for tests, with the configuration and the rules of this repository.

`make prometheus` unpacks it on Debian and Ubuntu. Where REQUIRE_PROMETHEUS is set its absence is a failure, not a skip.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "prometheus"
UNPACKED = ROOT / ".tools" / "usr" / "bin"
REQUIRED = bool(os.environ.get("REQUIRE_PROMETHEUS"))
WAIT = 30.0  # seconds for what takes one on an idle machine

Labels = dict[str, str]


def tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    found = shutil.which(name, path=f"{UNPACKED}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        (pytest.fail if REQUIRED else pytest.skip)(f"no {name}: `make prometheus` unpacks it on Debian and Ubuntu")
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *map(str, arguments)], input=text, capture_output=True, text=True)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, through its HTTP API."""

    client: httpx.Client
    moment: float | None = None  # the time that queries are for; None: now

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return values with their labels. Raises AssertionError with Prometheus' message if it is not PromQL."""
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
        end = time.monotonic() + WAIT
        while not until():
            assert time.monotonic() < end, f"waited in vain for {what}"
            time.sleep(0.1)

    def wait_for_scrapes(self, number: int) -> None:
        """Wait until it has scraped the metrics `number` times more."""
        before = self._scrapes()
        self.wait(lambda: self._scrapes() >= before + number, "scrapes")

    def _scrapes(self) -> float:
        return sum(value for _, value in self.query("sum_over_time(up[1h])"))

    def _get(self, what: str, **parameters: str) -> Any:
        answer = self.client.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", (answer["error"], parameters)
        return answer["data"]


@contextmanager
def running_prometheus(folder: Path, target: str, interval: str = "500ms") -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` (host:port), configured by config/prometheus but for the interval."""
    config = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(CONFIG / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=output,
        )
    try:
        with httpx.Client(base_url=f"http://{_address(process, log)}", timeout=WAIT) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(WAIT)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the URL of a Prometheus, once it is ready."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text()
        address = re.search(r'"?Listening on"? address=(\S+)', text)
        if address and "ready to receive web requests" in text:
            return address[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())
