"""The HTTP application: which routers there are and what they are given. Wiring only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from config.settings import Settings
from server.api import access, admin, chat, completions, errors, health, kv_cache, models, request_log, tokenize
from server.api.answers import Serving
from server.api.bounds import Bounds
from server.api.deadlines import Deadlines
from server.api.ended import Ended
from server.api.jobs import Most
from server.api.lifetime import Lifetime
from server.api.observations import Observations
from server.api.tracing import Tracing, tracing_to
from server.engine.client import EngineClient
from server.text.tokenizer import Tokenizer
from server.version import version

# FastAPI's own: another span around ours, and exceptions with their messages, which may quote prompts. Versions that
# have none take no notice.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def create_app(settings: Settings, client: EngineClient, tokenizer: Tokenizer, observations: Observations) -> FastAPI:
    """The application; while it runs, `client` stays connected, and is told of `observations`. Raises SettingsError."""
    tracing = tracing_to(settings.otlp_traces_endpoint)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client, observations:
            yield
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="kvmux",
        summary="OpenAI's API, with a KV-cache strategy for each request.",
        version=version(),
        lifespan=lifespan,
        redirect_slashes=False,  # a redirected POST surprises clients
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    errors.install(app)
    add_middleware(app, settings, tracing, observations)
    add_routers(app, settings, client, tokenizer)
    app.include_router(health.router(client, observations))
    return app


def add_middleware(app: FastAPI, settings: Settings, tracing: Tracing | None, observations: Observations) -> None:
    """The last one is asked first."""
    app.add_middleware(access.Access, api_keys=settings.api_keys, admin_token=settings.admin_token)
    app.add_middleware(
        Bounds,
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_bytes,
        body_timeout=settings.body_timeout,
    )
    if settings.cors_origins is not None:  # before access: a browser's question whether it may ask has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=errors.METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
        )

    def tell(ended: Ended) -> None:
        trace_id = None if tracing is None else tracing.record(ended)
        request_log.write(ended, trace_id, with_prompts=settings.log_prompts)

    app.add_middleware(Lifetime, responded=observations.responded, ended=tell)


def add_routers(app: FastAPI, settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> None:
    deadlines = Deadlines(settings.queue_timeout, settings.request_timeout)
    most = Most(min(settings.max_choices, settings.max_num_seqs + settings.max_waiting), settings.max_prompt_characters)
    serving = Serving(client, tokenizer, most, deadlines, settings.log_prompts)
    keyed = APIRouter()
    if settings.api_keys is not None:
        keyed = APIRouter(dependencies=[access.secured("API key")], responses=errors.documented(401))
    keyed.include_router(completions.router(serving))
    keyed.include_router(chat.router(serving))
    keyed.include_router(tokenize.router(serving))
    keyed.include_router(models.router(client))
    keyed.include_router(kv_cache.router(client))
    app.include_router(keyed)
    app.include_router(admin.router(client, tokenizer), dependencies=[access.secured("admin token")])
