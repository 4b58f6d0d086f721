"""Administration of the caches: inspect and clear them, pin prefixes, change shares of the memory.

Sends commands, which the engine carries out; `Access` in server/api/http/middleware.py checks the admin token.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import Field

from config.sizes import Share
from server.api.http.errors import make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import StrictJsonRoute
from server.api.http.middleware import ADMIN_PREFIX
from server.api.openai.generation_job import RequestLimits, check_prompt, hash_api_key
from server.api.openai.request_models import Prompt
from server.engine.ipc import messages
from server.engine.ipc.client import EngineClient
from server.text.tokenizer import TokenizerBase

MAX_PIN_SECONDS = 7 * 24 * 3600  # seconds


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
