"""Routes for operators: /health (this process lives), /ready (requests are served), /version."""

from __future__ import annotations

from fastapi import APIRouter

from server.api.http.errors import make_error_responses
from server.engine.ipc.client import EngineClient
from server.version import get_version


def router(client: EngineClient) -> APIRouter:
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
