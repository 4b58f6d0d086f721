"""Sends the engine what only an API process knows: its responses by status, and its memory. The engine counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import psutil

from server.engine.ipc.client import EngineClient, EngineLost
from server.engine.ipc.messages import Observed

SEND_INTERVAL = 1.0  # seconds between two messages to the engine


class Observations:
    """Responses that were not yet reported to the engine. Within `async with` they are sent every second."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._responses: Counter[int] = Counter()
        self._process = psutil.Process()
        self._task: asyncio.Task[None] | None = None

    def count_response(self, status: int) -> None:
        self._responses[status] += 1

    def send(self) -> None:
        """Send them now; while there is no engine, they are kept."""
        with contextlib.suppress(EngineLost):
            self._client.send_observed(Observed(dict(self._responses), self._process.memory_info().rss))
            self._responses.clear()

    async def __aenter__(self) -> Observations:
        self._task = asyncio.create_task(self._send_periodically(), name="observations")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.send()

    async def _send_periodically(self) -> None:
        while True:
            self.send()
            await asyncio.sleep(SEND_INTERVAL)
