"""Run one of the programs as developers do, in a process of its own, and read its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_tool(name: str, *flags: str) -> dict[str, Any]:
    """Return the report of `python -m tools.NAME`, which is shown where a test fails."""
    command = [sys.executable, "-m", f"tools.{name}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stderr, done.stdout)
    assert done.stdout, f"exit code {done.returncode}, and no report"
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    return report
