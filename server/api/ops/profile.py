"""POST /v1/profile: a chrome trace of real steps, and a table of it. The engine's answer is passed on as bytes."""

from __future__ import annotations

import asyncio
import gzip

from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.api.http.errors import make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import JsonRoute
from server.api.http.middleware import PROFILE_PATH
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Profile

MAX_STEPS = 200
MAX_SECONDS = 60.0
EXTRA_TIMEOUT = 120.0  # seconds that loading torch's profiler and writing a trace may take in addition


class ProfileRequest(Body):
    """Body of POST /v1/profile: whichever limit is reached first ends the recording."""

    steps: int = Field(MAX_STEPS, ge=1, le=MAX_STEPS, description="that are recorded at most")
    seconds: float = Field(10.0, gt=0, le=MAX_SECONDS, description="after which recording ends, however few steps")


def router(client: EngineClient) -> APIRouter:
    routes = APIRouter(
        route_class=JsonRoute,
        tags=["administration"],
        responses=make_error_responses(400, 401, 403, 409, 413, 503),
    )

    @routes.post(PROFILE_PATH)
    async def profile(request: Request, body: ProfileRequest | None = None) -> Response:
        wanted = body or ProfileRequest()
        patience = wanted.seconds + EXTRA_TIMEOUT
        packed = await client.query(Profile(wanted.steps, wanted.seconds), patience)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type="application/json", headers={"Content-Encoding": "gzip"})
        return Response(await asyncio.to_thread(gzip.decompress, packed), media_type="application/json")

    return routes
