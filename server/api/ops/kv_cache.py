"""What the engine reports: GET /v1/kv_cache, the strategies and their state; /v1/settings, the settings in effect."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.api.http.errors import make_error_responses
from server.api.ops.latest import Latest
from server.engine.ipc.client import EngineClient


def router(client: EngineClient) -> APIRouter:
    routes = APIRouter(tags=["kv cache"], responses=make_error_responses(503))
    caches, in_effect = Latest(client, "kv_cache"), Latest(client, "settings")

    @routes.get("/v1/kv_cache")
    async def kv_cache() -> Response:
        return Response((await caches.get()).body, media_type="application/json")

    @routes.get("/v1/settings")
    async def settings() -> Response:
        return Response((await in_effect.get()).body, media_type="application/json")

    return routes
