"""The engine's latest answer to a question, fetched at most once in ANSWER_TTL seconds.

However many clients poll however often, the engine gets one query a second from this process, and all clients get the
same answer. Knows no question's contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from server.engine.ipc.client import EngineClient, EngineRefused
from server.engine.ipc.messages import ANSWER_TTL, Answer, Question


class Latest:
    """Caches the answer to one question for ANSWER_TTL seconds; `before_query` is called before each query."""

    def __init__(
        self, client: EngineClient, question: Question, before_query: Callable[[], None] = lambda: None
    ) -> None:
        self._client = client
        self._question = question
        self._before_query = before_query
        self._answer: Answer | None = None
        self._expires_at = 0.0  # monotonic seconds: when the answer expires
        self._epoch: object = None  # the client's, when the query was sent
        self._query_task: asyncio.Task[None] | None = None

    async def get(self) -> Answer:
        """Return the answer. Raises EngineLost, and EngineRefused, which is cached like an answer."""
        self._client.get_hello()
        if monotonic() >= self._expires_at:
            await self._refresh()
        while self._epoch is not self._client.epoch:  # there was a command in between, or a new engine
            await self._refresh()
        assert self._answer is not None
        if self._answer.error is not None:
            raise EngineRefused(self._answer.error)
        return self._answer

    async def _refresh(self) -> None:
        """Wait for the query that is under way; send one if there is none."""
        if self._query_task is None or self._query_task.done():
            self._query_task = asyncio.create_task(self._query(), name=f"ask for {self._question}")
            # Every waiting client may have left: then nothing else looks at its exception.
            self._query_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._query_task)

    async def _query(self) -> None:
        self._before_query()
        epoch = self._client.epoch
        self._answer = await self._client.send_query(self._question)
        self._expires_at, self._epoch = self._answer.created_at + ANSWER_TTL, epoch
