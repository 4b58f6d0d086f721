"""A real Prometheus for tests, with the configuration and the rules of this repository.

`make prometheus` unpacks it on Debian and Ubuntu. Where REQUIRE_PROMETHEUS is set its absence is a failure, not a skip.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tools.prometheus import Prometheus, find_tool, make_config, run_prometheus
from tools.server_process import RunError

__all__ = ["CONFIG", "ROOT", "Prometheus", "promtool", "running_prometheus", "tool"]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "prometheus"
REQUIRED = bool(os.environ.get("REQUIRE_PROMETHEUS"))


def tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it the test is skipped, or fails if it is required."""
    try:
        return find_tool(name)
    except RunError as error:
        (pytest.fail if REQUIRED else pytest.skip)(str(error))


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *map(str, arguments)], input=text, capture_output=True, text=True)


@contextmanager
def running_prometheus(folder: Path, target: str, interval: str = "500ms") -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` (host:port), configured by config/prometheus but for the interval."""
    tool("prometheus")
    given = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    given["rule_files"] = [str(CONFIG / name) for name in given["rule_files"]]
    with run_prometheus(folder, make_config(target, interval, given)) as prometheus:
        yield prometheus
