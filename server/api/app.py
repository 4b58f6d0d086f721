"""The HTTP application: which routers there are and what they are given. Wiring only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from config.settings import Settings
from server.api import admin, chat, completions, errors, health, kv_cache, models, tokenize
from server.api.jobs import Most
from server.api.request_id import RequestId
from server.engine.client import EngineClient
from server.text.tokenizer import Tokenizer


def create_app(settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> FastAPI:
    """The application; while it runs, `client` stays connected."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(
        title="kvmux",
        summary=f"Serves {settings.model}, with a KV-cache strategy for each request.",
        lifespan=lifespan,
        redirect_slashes=False,  # a redirected POST surprises clients
        redoc_url=None,
    )
    app.add_middleware(RequestId)
    errors.install(app)
    most = Most(settings.max_choices, settings.max_prompt_characters)
    app.include_router(completions.router(client, tokenizer, most))
    app.include_router(chat.router(client, tokenizer, most))
    app.include_router(tokenize.router(client, tokenizer))
    app.include_router(models.router(client))
    app.include_router(kv_cache.router(client))
    app.include_router(admin.router(client, tokenizer, settings.admin_token))
    app.include_router(health.router(client))
    return app
