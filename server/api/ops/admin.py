"""Administration: of the caches (inspect, clear, pin prefixes, change shares of the memory), and profiles of steps.

POST /v1/profile returns a chrome trace of real steps with a table of it. The engine carries out the commands;
`AuthenticationMiddleware` in server/api/http/middleware.py checks the admin token.
"""

from __future__ import annotations

import asyncio
import gzip

from fastapi import APIRouter, Request, Response
from pydantic import Field

from config.sizes import Share
from server.api.http.errors import make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import JsonRoute, StrictJsonRoute
from server.api.http.middleware import ADMIN_PREFIX, PROFILE_PATH
from server.api.openai.generation_job import RequestLimits, check_prompt, hash_api_key
from server.api.openai.request_models import Prompt
from server.engine.ipc import messages
from server.engine.ipc.client import EngineClient
from server.text.tokenizer import TokenizerBase

MAX_PIN_SECONDS = 7 * 24 * 3600  # seconds
MAX_PROFILED_STEPS = 200
MAX_PROFILED_SECONDS = 60.0
PROFILE_EXTRA_TIMEOUT = 120.0  # seconds that loading torch's profiler and writing a trace may take in addition


class TenantBody(Body):
    """The tenant and the cache_salt that a command is for."""

    api_key: str | None = Field(
        None, pattern=r"^(\S.*)?$", description="the tenant's API key; empty: of clients without one"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @property
    def tenant(self) -> str:
        return hash_api_key((self.api_key or "").encode())


class ClearRequest(TenantBody):
    """Body of POST .../clear; without a field everything is cleared."""

    def to_command(self, instance: str) -> messages.Clear:
        everything = self.api_key is None and self.cache_salt is None
        return messages.Clear(instance, None if everything else self.tenant, self.cache_salt)


class PinRequest(TenantBody):
    """Body of POST .../pins."""

    prompt: Prompt
    ttl: float = Field(gt=0, le=MAX_PIN_SECONDS, description="seconds")


class ShareRequest(Body):
    """Body of PATCH; a field that is absent changes nothing."""

    floor: Share | None = Field(None, description="KV memory that no other instance may take: '10%' or '512MiB'")
    limit: Share | None = Field(None, description="KV memory it may hold at most")


def router(client: EngineClient, tokenizer: TokenizerBase, limits: RequestLimits) -> APIRouter:
    routes = APIRouter(
        prefix=f"{ADMIN_PREFIX}{{instance}}",
        route_class=StrictJsonRoute,
        tags=["administration"],
        responses=make_error_responses(400, 401, 403, 404, 409, 413, 503),
    )

    async def send_command(command: messages.Command) -> Response:
        return Response(await client.query(command), media_type="application/json")

    @routes.get("")
    async def inspect(instance: str) -> Response:
        return await send_command(messages.Inspect(instance))

    @routes.patch("")
    async def share(instance: str, body: ShareRequest) -> Response:
        return await send_command(messages.Share(instance, body.floor, body.limit))

    @routes.post("/clear")
    async def clear(instance: str, body: ClearRequest | None = None) -> Response:
        return await send_command((body or ClearRequest()).to_command(instance))

    @routes.post("/pins")
    async def pin(instance: str, body: PinRequest) -> Response:
        hello = client.get_hello()
        limits.check_length(body.prompt, "prompt", hello.max_seq_len)
        prompt = body.prompt if isinstance(body.prompt, list) else await tokenizer.encode(body.prompt)
        check_prompt(prompt, 0, hello)
        return await send_command(messages.PinPrefix(instance, prompt, body.ttl, body.tenant, body.cache_salt or ""))

    @routes.delete("/pins/{pin_id}")
    async def unpin(instance: str, pin_id: str) -> Response:
        return await send_command(messages.Unpin(instance, pin_id))

    return routes


# ---------------------------------------------------------------- profiles
class ProfileRequest(Body):
    """Body of POST /v1/profile: whichever limit is reached first ends the recording."""

    steps: int = Field(MAX_PROFILED_STEPS, ge=1, le=MAX_PROFILED_STEPS, description="that are recorded at most")
    seconds: float = Field(
        10.0, gt=0, le=MAX_PROFILED_SECONDS, description="after which recording ends, however few steps"
    )


def profile_router(client: EngineClient) -> APIRouter:
    routes = APIRouter(
        route_class=JsonRoute,
        tags=["administration"],
        responses=make_error_responses(400, 401, 403, 409, 413, 503),
    )

    @routes.post(PROFILE_PATH)
    async def profile(request: Request, body: ProfileRequest | None = None) -> Response:
        wanted = body or ProfileRequest()
        patience = wanted.seconds + PROFILE_EXTRA_TIMEOUT
        packed = await client.query(messages.Profile(wanted.steps, wanted.seconds), patience)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type="application/json", headers={"Content-Encoding": "gzip"})
        return Response(await asyncio.to_thread(gzip.decompress, packed), media_type="application/json")

    return routes
