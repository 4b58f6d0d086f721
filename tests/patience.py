"""Waits for what has to happen: as long as it may take on a busy machine, and no longer than it takes."""

from __future__ import annotations

import time

import httpx

PATIENCE = 120.0  # seconds that anything may take on a busy machine


def eventually(true: object, patience: float = PATIENCE) -> None:
    """Wait until `true()` is true, for `patience` seconds at most: a machine may be busy."""
    assert callable(true)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError("it did not come about")
