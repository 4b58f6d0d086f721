"""Starts `kvmux serve` from a checkout and measures the time until it is ready, for tools that compare checkouts.

Imports nothing of the server, which may be an earlier version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

THIS_CHECKOUT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 120.0  # for a server to start, or to answer
POLL_SECONDS = 0.01  # between two checks whether the server is ready
ADDRESS = re.compile(r"serves .* on (http://\S+)")


class ServeProcess(NamedTuple):
    """A running server, and the time it took to start."""

    url: str
    process: psutil.Process
    start_seconds: float  # until the first 200 of /ready
    output: Path  # file of what the server prints and logs, readable until it is stopped by `serving`

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and all its descendants."""
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def serving(checkout: Path, flags: Sequence[str]) -> Iterator[ServeProcess]:
    """Run `kvmux serve` from a checkout until the block ends."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT)
        try:
            printed = Path(f"/proc/self/fd/{output.fileno()}")
            url = _wait_until_ready(process, printed)
            yield ServeProcess(url, psutil.Process(process.pid), time.monotonic() - start, printed)
        finally:
            process.terminate()
            process.wait(TIMEOUT_SECONDS)


def _wait_until_ready(process: subprocess.Popen[bytes], printed: Path) -> str:
    """Wait until the server is ready; return its URL. Raises SystemExit with its output if it does not start."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (found := ADDRESS.search(printed.read_text())) and _is_ready(found[1]):
            return found[1]
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"the server did not start:\n{printed.read_text()}")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
