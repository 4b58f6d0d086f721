"""For those who run the server: /health (this process lives), /ready (requests are served), /version, /metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from server.api.errors import documented
from server.api.observations import Observations
from server.engine.client import EngineClient
from server.version import version

OPENMETRICS = "application/openmetrics-text"


def router(client: EngineClient, observations: Observations) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses=documented(503))
    async def ready() -> dict[str, str]:
        return {"status": "ready", "model": client.served().model}

    @routes.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": version()}

    @routes.head("/metrics", include_in_schema=False)
    @routes.get("/metrics", responses={200: {"content": {"text/plain": {}, OPENMETRICS: {}}}, **documented(503)})
    async def metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        observations.tell()  # before it asks, so that they are in
        if OPENMETRICS in accept:
            return Response(
                await client.query("openmetrics"), media_type=f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
            )
        return Response(await client.query("metrics"), media_type="text/plain; version=0.0.4")

    return routes
