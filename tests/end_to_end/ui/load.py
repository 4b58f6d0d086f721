"""Requests that keep a server busy while a test looks at its page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.server_process import PATIENCE


@contextmanager
def loaded(url: str, *, concurrency: int = 6, max_tokens: int = 200, shared_tokens: int = 256) -> Iterator[None]:
    """Load a server with `kvmux bench`, under one strategy after the other, until the block ends."""
    command = [sys.executable, "-m", "server", "bench", "--url", url, "--workload", "a"]
    command += ["--concurrency", str(concurrency), "--requests", "6", "--rounds", "10000"]
    command += ["--prompt-tokens", "200", "--shared-tokens", str(shared_tokens), "--max-tokens", str(max_tokens)]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None, "the load has ended before the test"
    finally:
        process.terminate()
        process.wait(PATIENCE)
