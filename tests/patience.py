"""Waits for what has to happen: as long as it may take on a busy machine, and no longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

PATIENCE = 120.0  # seconds that anything may take on a busy machine


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until `condition()` is true; raise AssertionError after `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"the condition was not true within {patience:g} s")
