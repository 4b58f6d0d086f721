"""Endpoints for operators: /health, /ready, /version, /metrics, and the engine's description of caches and settings.

An answer of the engine is reused until it expires: however many clients poll, it gets one query of each kind a second
from this process. The engine sends metrics as a snapshot, which this process writes as text, so that no
step of the engine waits for it. Knows neither the contents of answers nor any metric by name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Annotated, Literal

import psutil
from fastapi import APIRouter, Header, Response

from server.api.http.errors import make_error_responses
from server.engine.ipc.client import EngineClient, EngineLost, EngineRefused
from server.engine.ipc.messages import Answer, Question, get_answer_ttl
from server.engine.ipc.observations import ObservedCounts
from server.metrics.exposition import Renderer
from server.version import get_version

OPENMETRICS = "application/openmetrics-text"
SEND_INTERVAL = 1.0  # seconds between two reports of the counted responses to the engine


# ---------------------------------------------------------------- this process
def health_router(client: EngineClient) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses=make_error_responses(503))
    async def ready() -> dict[str, str]:
        return {"status": "ready", "model": client.get_hello().model}

    @routes.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": get_version()}

    return routes


class Observations:
    """Counts what happens in this process, by `counts`; within `async with`, reports it to the engine every second."""

    def __init__(self, client: EngineClient) -> None:
        self.counts = ObservedCounts()
        self._client = client
        self._process = psutil.Process()
        self._task: asyncio.Task[None] | None = None

    def count_response(self, status: int) -> None:
        self.counts.responses[status] += 1

    def send(self) -> None:
        """Report the counts, and this process's memory, to the engine; without an engine, keep them."""
        with contextlib.suppress(EngineLost):
            self._client.send_observed(self.counts.make_message(self._process.memory_info().rss))
            self.counts.clear()

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


# ---------------------------------------------------------------- the engine's answers
class CachedAnswer:
    """Caches the engine's answer to one question until it expires; calls `before_query` before each query."""

    def __init__(
        self,
        client: EngineClient,
        question: Question | Literal["rollouts", "fidelity"],
        before_query: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._question = question
        self._before_query = before_query
        self._answer: Answer | None = None
        self._expires_at = 0.0  # monotonic seconds: when the answer expires
        self._epoch: object = None  # `epoch` of the EngineClient when the query was sent
        self._query_task: asyncio.Task[None] | None = None

    async def get(self) -> Answer:
        """Return the engine's answer to the question, at most `get_answer_ttl` seconds old.

        Raises EngineLost without an engine, and EngineRefused if the engine refuses, which is cached, too.
        """
        self._client.get_hello()
        if monotonic() >= self._expires_at:
            await self._refresh()
        while self._epoch is not self._client.epoch:  # `epoch` changes with each command and each new engine
            await self._refresh()
        assert self._answer is not None
        if self._answer.error is not None:
            raise EngineRefused(self._answer.error)
        return self._answer

    async def _refresh(self) -> None:
        """Wait for the query to the engine that is under way; send one if there is none."""
        if self._query_task is None or self._query_task.done():
            self._query_task = asyncio.create_task(self._query(), name=f"ask for {self._question}")
            # Retrieve the task's exception: if every waiting client has left, nothing else does, and asyncio complains.
            self._query_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._query_task)

    async def _query(self) -> None:
        self._before_query()
        epoch = self._client.epoch
        self._answer = await self._client.send_query(self._question)
        self._expires_at, self._epoch = self._answer.created_at + get_answer_ttl(self._question), epoch


def kv_cache_router(client: EngineClient) -> APIRouter:
    routes = APIRouter(tags=["kv cache"], responses=make_error_responses(503))
    caches, in_effect = CachedAnswer(client, "kv_cache"), CachedAnswer(client, "settings")

    @routes.get("/v1/kv_cache")
    async def kv_cache() -> Response:
        return Response((await caches.get()).body, media_type="application/json")

    @routes.get("/v1/settings")
    async def settings() -> Response:
        return Response((await in_effect.get()).body, media_type="application/json")

    return routes


# ---------------------------------------------------------------- metrics
class Page:
    """The text that /metrics returns: the latest snapshot, written once in each format."""

    def __init__(self, client: EngineClient, observations: Observations) -> None:
        self._snapshot = CachedAnswer(
            client, "metrics", before_query=observations.send
        )  # send the counts first, so that the snapshot has this process's latest responses
        self._renderer = Renderer()
        self._written: Answer | None = None
        self._texts: dict[bool, bytes] = {}

    async def render(self, *, openmetrics: bool) -> bytes:
        answer = await self._snapshot.get()
        if answer is not self._written:
            self._written, self._texts = answer, {}
        if openmetrics not in self._texts:
            self._texts[openmetrics] = self._renderer.render(answer.body, openmetrics=openmetrics)
        return self._texts[openmetrics]


def metrics_router(client: EngineClient, observations: Observations) -> APIRouter:
    routes = APIRouter(tags=["health"])
    page = Page(client, observations)

    @routes.head("/metrics", include_in_schema=False)
    @routes.get(
        "/metrics", responses={200: {"content": {"text/plain": {}, OPENMETRICS: {}}}, **make_error_responses(503)}
    )
    async def metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        if OPENMETRICS in accept:
            content_type = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
            return Response(await page.render(openmetrics=True), media_type=content_type)
        return Response(await page.render(openmetrics=False), media_type="text/plain; version=0.0.4")

    return routes
