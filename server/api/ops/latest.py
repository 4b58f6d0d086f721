"""The engine's latest answer to a question, fetched at most once in ANSWER_SECONDS.

However many clients poll however often, the engine gets one query a second from this process, and all clients get the
same answer. Knows no question's contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from server.engine.ipc.client import EngineClient, EngineRefused
from server.engine.ipc.messages import ANSWER_SECONDS, Answer, Question


class Latest:
    """Caches the answer to one question for ANSWER_SECONDS; `before` is called before each query."""

    def __init__(self, client: EngineClient, question: Question, before: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._question = question
        self._before = before
        self._known: Answer | None = None
        self._until = 0.0  # monotonic seconds: when the answer expires
        self._era: object = None  # the client's, when the query was sent
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> Answer:
        """Return the answer. Raises EngineLost, and EngineRefused, which is cached like an answer."""
        self._client.served()
        if monotonic() >= self._until:
            await self._refresh()
        while self._era is not self._client.era:  # there was a command meanwhile, or a new engine
            await self._refresh()
        assert self._known is not None
        if self._known.refused is not None:
            raise EngineRefused(self._known.refused)
        return self._known

    async def _refresh(self) -> None:
        """Wait for the query that is under way; send one if there is none."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name=f"ask for {self._question}")
            # Every waiting client may have left: then nothing else looks at its exception.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        self._before()
        era = self._client.era
        self._known = await self._client.ask(self._question)
        self._until, self._era = self._known.made + ANSWER_SECONDS, era
