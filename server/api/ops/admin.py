"""Administration of the caches (inspect, clear, pin and drop prefixes, change shares of the memory), and profiles.

POST /v1/profile returns a Chrome trace of real steps, with a table of its times. The engine carries out the commands;
`AuthenticationMiddleware` in server/api/http/middleware.py checks the admin token.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field

from config.sizes import Share
from config.units import Duration
from server.api.http.api_keys import hash_api_key
from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import JsonRoute, StrictJsonRoute
from server.api.http.middleware import ADMIN_PREFIX, PROFILE_PATH
from server.api.openai.generation_job import RequestLimits, check_prompt
from server.api.openai.request_models import Prompt
from server.engine.ipc import messages
from server.engine.ipc.client import EngineClient
from server.text.tokenizer import TokenizerBase

MAX_PIN_SECONDS = 7 * 24 * 3600  # seconds
MAX_PROFILED_STEPS = 200
MAX_PROFILED_SECONDS = 60.0
PROFILE_EXTRA_TIMEOUT = 120.0  # seconds to wait beyond the recording, for loading torch's profiler and writing a trace


def _check_api_key(key: str) -> str:
    """Return the key. Raises ValueError, which does not quote it, if no client can send it in a header."""
    if key[:1].isspace() or "\n" in key:
        raise ValueError("should neither begin with a space nor have several lines")
    return key


class TenantBody(Body):
    """The tenant and the cache_salt whose cached blocks a command affects."""

    api_key: Annotated[str, AfterValidator(_check_api_key)] | None = Field(
        None, description="the tenant's API key; empty: the clients without a key"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @property
    def tenant(self) -> str:
        return hash_api_key((self.api_key or "").encode())


class ClearRequest(TenantBody):
    """Body of POST /v1/kv_cache/{instance}/clear; without api_key and cache_salt all tenants' blocks are cleared."""

    def to_command(self, instance: str) -> messages.Clear:
        everything = self.api_key is None and self.cache_salt is None
        return messages.Clear(instance, None if everything else self.tenant, self.cache_salt)


class PinRequest(TenantBody):
    """Body of POST /v1/kv_cache/{instance}/pins: keeps the prefix of a prompt, or one with an id, for `ttl` seconds."""

    prompt: Prompt | None = None
    prefix: str | None = Field(None, max_length=256, description="id of a cached prefix, instead of a prompt")
    ttl: Duration = Field(gt=0, le=MAX_PIN_SECONDS, description="seconds, or a text such as '10m'")

    def check_fields(self) -> None:
        """Raise ApiError unless there is either a prompt or a prefix; a prefix excludes `api_key` and `cache_salt`."""
        if (self.prompt is None) == (self.prefix is None):
            raise ApiError(400, "prompt: send either a prompt or the id of a prefix", param="prompt")
        for name in ("api_key", "cache_salt"):
            if self.prefix is not None and getattr(self, name) is not None:
                raise ApiError(400, f"{name}: leave it out, as the prefix says whose it is", param=name)


class ShareRequest(Body):
    """Body of PATCH /v1/kv_cache/{instance}: new shares of the memory; an absent field changes nothing."""

    floor: Share | None = Field(None, description="KV memory that other instances may not take: '10%' or '512MiB'")
    limit: Share | None = Field(None, description="most KV memory that the instance may hold, such as '50%' or '2GiB'")


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
        body.check_fields()
        if body.prefix is not None:
            return await send_command(messages.PinCachedPrefix(instance, body.prefix, body.ttl))
        assert body.prompt is not None  # by check_fields
        limits.check_length(body.prompt, "prompt")
        prompt = body.prompt if isinstance(body.prompt, list) else await tokenizer.encode(body.prompt)
        check_prompt(prompt, 0, hello)
        return await send_command(messages.PinPrefix(instance, prompt, body.ttl, body.tenant, body.cache_salt or ""))

    @routes.delete("/pins/{pin_id}")
    async def unpin(instance: str, pin_id: str) -> Response:
        return await send_command(messages.Unpin(instance, pin_id))

    @routes.delete("/prefixes/{prefix_id}")
    async def drop_prefix(instance: str, prefix_id: str) -> Response:
        return await send_command(messages.DropPrefix(instance, prefix_id))

    return routes


# ---------------------------------------------------------------- profiles
class ProfileRequest(Body):
    """Body of POST /v1/profile: the recording ends after `steps` steps or `seconds` seconds, whichever comes first."""

    steps: int = Field(
        MAX_PROFILED_STEPS, ge=1, le=MAX_PROFILED_STEPS, description="greatest number of engine steps to record"
    )
    seconds: Duration = Field(
        10.0,
        gt=0,
        le=MAX_PROFILED_SECONDS,
        description="seconds after which recording ends, however few steps it has",
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
