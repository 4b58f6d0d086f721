"""GET /metrics: the engine's snapshot as text, written by the API process so that the engine's steps do not wait.

Knows no metric by name.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from server.api.http.errors import make_error_responses
from server.api.ops.latest import Latest
from server.api.ops.observations import Observations
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Answer
from server.metrics.exposition import Renderer

OPENMETRICS = "application/openmetrics-text"


class Page:
    """The text of the latest snapshot, written once in each format."""

    def __init__(self, client: EngineClient, observations: Observations) -> None:
        self._latest = Latest(client, "metrics", before_query=observations.send)  # so that the snapshot has them
        self._renderer = Renderer()
        self._written: Answer | None = None
        self._texts: dict[bool, bytes] = {}

    async def render(self, *, openmetrics: bool) -> bytes:
        answer = await self._latest.get()
        if answer is not self._written:
            self._written, self._texts = answer, {}
        if openmetrics not in self._texts:
            self._texts[openmetrics] = self._renderer.render(answer.body, openmetrics=openmetrics)
        return self._texts[openmetrics]


def router(client: EngineClient, observations: Observations) -> APIRouter:
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
