"""An API process on Ray Serve: the HTTP application of `kvmux serve`, whose requests a router sends to replicas.

Paths below /replicas/ID/ are those of the whole application for one replica alone, its metrics and page included;
GET /v1/replicas lists the ids. What only one replica can answer is answered by the application of the first one.
Ray's proxy holds the clients' connections, so server/api/http/connection.py is not used.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Callable
from time import monotonic
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.settings import Settings
from server.api.app import create_app
from server.api.http.errors import ApiError, make_error_response
from server.api.http.middleware import API_PREFIX, PROFILE_PATH
from server.api.ops.live import LiveState
from server.api.ops.monitoring import Observations
from server.api.worker import make_tokenizer
from server.cluster.client import ClusterClient, ReplicaClient
from server.cluster.hints import HintMaker
from server.cluster.serve.ray_calls import HandleCalls
from server.logs import configure_logging, hide_exception_messages
from server.models.files.directory import resolve_model_settings

log = logging.getLogger(__name__)

REPLICA_PATH = re.compile(r"/replicas/([A-Za-z0-9_-]{1,64})(/.*)")
# Paths whose answers are one replica's: they cannot be merged, or would be too large. DELETE goes to all replicas
ONE_REPLICA_PATH = re.compile(rf"({API_PREFIX})?/(live(/.*)?|settings)|{PROFILE_PATH}")
REPLICA_HEADER = b"x-kvmux-replica"  # the replica that has answered
HEALTH_CHECK_PERIOD = 2.0  # seconds between two calls of `ClusterIngress.check_health`, by Ray's controller
# Seconds without such a call after which this process is taken for one that drains: Ray says so in no other way. While
# the controller itself is away, streams that have no end are cut, and clients open them again
DRAINING_AFTER = 3 * HEALTH_CHECK_PERIOD
MAX_APPS = 64  # most replicas whose applications are kept; more are made anew when they are asked for


class ClusterIngress:
    """The application of one API process."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        """Make the application; `replicas` is the deployment handle of the replicas."""
        multiprocessing.current_process().name = "api"  # in the log
        self._checked_at = monotonic()
        configure_logging(settings)
        if not settings.log_prompts:
            hide_exception_messages()
        self._settings = resolve_model_settings(settings)
        self._client = ClusterClient(HandleCalls(replicas), HintMaker(settings))
        self._tokenizer = make_tokenizer(self._settings)
        self._observations = Observations(self._client)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name is Ray's
        app = self._make_app(self._client)
        app.include_router(make_replicas_router(self._client))
        return ReplicaPaths(app, self._client, self._make_app)

    def _make_app(self, client: ClusterClient | ReplicaClient) -> FastAPI:
        live_state = LiveState(client, self._is_draining)
        return create_app(self._settings, client, self._tokenizer, self._observations, live_state)

    async def check_health(self) -> None:
        """Note that Ray wants this process to serve: it calls this until the process has to drain."""
        self._checked_at = monotonic()

    def _is_draining(self) -> bool:
        return monotonic() > self._checked_at + DRAINING_AFTER


def make_replicas_router(client: ClusterClient) -> APIRouter:
    """Return the router of GET /v1/replicas."""
    routes = APIRouter(tags=["replicas"])

    @routes.get("/v1/replicas")
    async def list_replicas() -> Response:
        """List the replicas, and whether each has an engine that is ready."""
        data = [
            {"id": id, "object": "replica", "ready": hello is not None, "path": f"/replicas/{id}/"}
            for id, hello in client.replicas.items()
        ]
        return Response(msgspec.json.encode({"object": "list", "data": data}), media_type="application/json")

    return routes


class ReplicaPaths:
    """An ASGI application that sends requests for one replica to the application of that replica.

    Those applications need no lifespan of their own: they share what the main one starts.
    """

    def __init__(
        self, app: ASGIApp, client: ClusterClient, make_app: Callable[[ClusterClient | ReplicaClient], ASGIApp]
    ) -> None:
        self._app = app
        self._client = client
        self._make_app = make_app
        self._apps: dict[str, tuple[ReplicaClient, ASGIApp]] = {}  # by replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope = remove_route_prefix(scope)
        if (found := REPLICA_PATH.fullmatch(scope["path"])) is not None:
            id, path = found.groups()
            raw_path = scope["raw_path"].removeprefix(f"/replicas/{id}".encode())
            scope = {**scope, "path": path, "raw_path": raw_path}
        elif ONE_REPLICA_PATH.fullmatch(scope["path"]) and scope["method"] != "DELETE" and self._client.hello:
            id = self._client.choose_one()
        else:
            return await self._app(scope, receive, send)
        client = self._client.get_replica(id)
        if client is None:
            error = ApiError(404, f"there is no replica {id!r}; GET /v1/replicas lists them", code="not_found")
            return await make_error_response(Request(scope), error)(scope, receive, send)

        async def send_with_replica(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, id.encode())]
            await send(message)

        await self._get_app(id, client)(scope, receive, send_with_replica)

    def _get_app(self, id: str, client: ReplicaClient) -> ASGIApp:
        known = self._apps.get(id)
        if known is None or known[0] is not client:
            if len(self._apps) >= MAX_APPS:
                self._apps.clear()
            known = self._apps[id] = client, self._make_app(client)
        return known[1]


def remove_route_prefix(scope: Scope) -> Scope:
    """Return the scope without the `route_prefix` of a Serve config file, which Ray leaves in the path.

    Starlette would ignore the prefix, but the middleware, which finds out by the path what key a request needs, not.
    """
    prefix = scope.get("root_path", "")
    if not prefix:
        return scope
    raw_path = scope["raw_path"].removeprefix(quote(prefix).encode())
    return {**scope, "root_path": "", "path": scope["path"].removeprefix(prefix) or "/", "raw_path": raw_path or b"/"}
