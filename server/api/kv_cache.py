"""GET /v1/kv_cache: the strategies and their state, in the engine's own words."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.api.errors import documented
from server.engine.client import EngineClient


def router(client: EngineClient) -> APIRouter:
    routes = APIRouter(tags=["kv cache"], responses=documented(503))

    @routes.get("/v1/kv_cache")
    async def kv_cache() -> Response:
        return Response(await client.query("kv_cache"), media_type="application/json")

    return routes
