"""Builds the HTTP application: connects its routers and middleware with the objects that they use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from config.settings import Settings
from server.api.http import errors
from server.api.http.api_keys import LimitsByKey
from server.api.http.middleware import (
    AuthenticationMiddleware,
    BodyLimitMiddleware,
    BodyLimits,
    RequestLifecycleMiddleware,
    UnversionedPathMiddleware,
    make_body_limits_getter,
    make_security_dependency,
)
from server.api.openai import chat, completions, models, tokenize
from server.api.openai.generation_job import Deadlines, RequestLimits, Serving
from server.api.openai.response_items import route as response_items
from server.api.openai.tools.message_format import MessageFormat
from server.api.ops import admin, live, rollouts
from server.api.ops.monitoring import Observations, health_router, kv_cache_router, metrics_router
from server.api.ops.request_log import EndedRequest, log_request
from server.api.ops.tracing import Tracing, make_tracing
from server.engine.ipc.client import EngineClient
from server.text.tokenizer import TokenizerBase, read_tokenizer_info
from server.ui.files import mount_ui
from server.version import get_version

# Switches off FastAPI's own telemetry: it would add a span around ours, and record the messages of exceptions, which
# may quote prompts. Versions of FastAPI without telemetry ignore this.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def create_app(
    settings: Settings,
    client: EngineClient,
    tokenizer: TokenizerBase,
    observations: Observations,
    live_state: live.LiveState,
    metrics_port: int | None = None,
) -> FastAPI:
    """Return the HTTP application. Raises SettingsError for settings that cannot be used.

    While it runs, `client` stays connected to the engine and sends it the counts of `observations`, and the processes
    of `tokenizer` run. `live_state` is what clients watch under /v1/live.
    `metrics_port` is the port of /metrics, if it has one of its own.
    """
    tracing = make_tracing(settings.otlp_traces_endpoint)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client, observations, tokenizer:
            yield
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="kvmux",
        summary="OpenAI's API, with a KV-cache strategy for each request.",
        version=get_version(),
        lifespan=lifespan,
        redirect_slashes=False,  # a redirected POST surprises clients
        docs_url=None,  # add_docs_page
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.unknown_fields = settings.unknown_fields
    errors.add_exception_handlers(app)
    add_middleware(app, settings, tracing, observations, make_body_limits_getter(settings, client), metrics_port)
    add_routers(app, settings, client, tokenizer, observations)
    app.include_router(health_router(client))
    app.include_router(metrics_router(client, observations))
    app.include_router(live.router(live_state, client), dependencies=[make_security_dependency("admin token")])
    add_docs_page(app)
    if settings.ui:
        mount_ui(app)
    return app


def add_docs_page(app: FastAPI) -> None:
    """Add /docs, which asks for openapi.json beside itself; FastAPI's own page would miss it below a path prefix."""

    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)


def add_middleware(
    app: FastAPI,
    settings: Settings,
    tracing: Tracing | None,
    observations: Observations,
    body_limits: Callable[[], BodyLimits],
    metrics_port: int | None,
) -> None:
    """Add the middleware; the one added last sees a request first."""
    app.add_middleware(
        AuthenticationMiddleware,
        api_keys=settings.api_keys,
        admin_token=settings.admin_token,
        metrics_key=settings.metrics_key,
        metrics_port=metrics_port,
    )
    app.add_middleware(UnversionedPathMiddleware)
    app.add_middleware(
        BodyLimitMiddleware,
        max_header_bytes=settings.max_header_bytes,
        body_limits=body_limits,
        body_timeout=settings.body_timeout,
    )
    # CORS sees requests before AuthenticationMiddleware: a browser's preflight request has no key
    if settings.cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=errors.METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
        )

    def record_end(ended: EndedRequest) -> None:
        trace_id = None if tracing is None else tracing.record(ended)
        log_request(ended, trace_id, with_prompts=settings.log_prompts)

    app.add_middleware(RequestLifecycleMiddleware, on_response=observations.count_response, on_end=record_end)


def add_routers(
    app: FastAPI, settings: Settings, client: EngineClient, tokenizer: TokenizerBase, observations: Observations
) -> None:
    deadlines = Deadlines(settings.queue_timeout, settings.request_timeout)
    limits = RequestLimits(
        min(settings.max_choices, settings.max_num_seqs + settings.max_queued_requests),
        settings.max_prompt_characters,
        settings.max_stop_strings,
        settings.max_grammar_bytes,
    )
    serving = Serving(
        client,
        tokenizer,
        limits,
        deadlines,
        LimitsByKey.from_settings(settings),
        MessageFormat.choose(tokenizer, settings.tool_call_parser, settings.reasoning_parser),
        observations.counts,
        settings.log_prompts,
        settings.skip_model_name_validation,
    )
    keyed = APIRouter()
    if settings.api_keys is not None:
        keyed = APIRouter(
            dependencies=[make_security_dependency("API key")], responses=errors.make_error_responses(401)
        )
    keyed.include_router(completions.router(serving))
    keyed.include_router(chat.router(serving))
    keyed.include_router(response_items.router(serving))
    info = read_tokenizer_info(Path(settings.model)) if settings.enable_tokenizer_info_endpoint else None
    keyed.include_router(tokenize.router(serving, info))
    keyed.include_router(models.router(client, list_strategies=settings.list_strategies))
    keyed.include_router(kv_cache_router(client))
    keyed.include_router(rollouts.reading_router(client))
    app.include_router(keyed)
    app.include_router(admin.router(client, tokenizer, limits), dependencies=[make_security_dependency("admin token")])
    app.include_router(admin.profile_router(client), dependencies=[make_security_dependency("admin token")])
    app.include_router(rollouts.command_router(client), dependencies=[make_security_dependency("admin token")])
