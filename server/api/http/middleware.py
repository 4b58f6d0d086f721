"""The middleware that every request passes between its connection and its route, in this order.

- `RequestLifecycleMiddleware` gives it an id, answers unexpected exceptions, and reports its response and its end;
- `BodyLimitMiddleware` limits the bytes and the seconds of its headers and its body;
- `UnversionedPathMiddleware` adds a missing /v1 to its path;
- `AuthenticationMiddleware` checks its API key.

Knows paths, tokens and the settings of limits, but no endpoint. Plain ASGI, as Starlette's BaseHTTPMiddleware would
hide disconnects. Bytes that never become a request are limited in server/api/http/connection.py.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

from fastapi import Request, Security
from fastapi.params import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.settings import Settings
from server.api.http.errors import ApiError, make_error_response, make_headers_error, to_api_error
from server.api.http.local_access import find_local_refusal
from server.api.ops.request_log import CLIENT_CLOSED_REQUEST, EndedRequest
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Hello

_VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
UNCOUNTED_BYTES = 2**16  # first bytes of each body, not counted as in flight: uvicorn buffers as many anyway
# Least speed at which bodies of more than UNCOUNTED_BYTES must arrive, measured after the first `body_timeout` seconds:
# they hold memory that other requests need
MIN_BYTES_PER_SECOND = 2**14
ADMIN_PREFIX = "/v1/kv_cache/"
PROFILE_PATH = "/v1/profile"
ROLLOUTS_PATH = "/v1/rollouts"
LIVE_PATH = "/v1/live"
FIDELITY_PATH = "/v1/fidelity"
DESCRIBING_PATHS = ("/v1/kv_cache", "/v1/settings")
READING_METHODS = ("GET", "HEAD")
API_PREFIX = "/v1"
# Prefixes of the paths that need an API key; /tokenizer_info begins with one of them, too
API_KEY_PREFIXES = (f"{API_PREFIX}/", "/tokenize", "/detokenize", "/apply-template")
METRICS_PATH = "/metrics"
SHARED_PATHS = ("/health", "/ready")
UNVERSIONED_ROUTES = (
    "/completions",
    "/chat/completions",
    "/responses",
    "/models",
    "/kv_cache",
    "/settings",
    "/rollouts",
    "/fidelity",
    "/live",
)


# ---------------------------------------------------------------- request id, errors, end
class RequestLifecycleMiddleware:
    """Middleware around all other, from a request's headers to its end.

    It gives every response the header x-request-id, the client's own or a new one, and x-ignored-fields where fields of
    the body have no effect. It reports the status of each response as it begins, 499 where none did, and how each
    request ended, and it answers unexpected exceptions. The application leaves its `error`, its `generation` and the
    `ignored_fields` of the body in the scope's state.
    """

    def __init__(
        self, app: ASGIApp, on_response: Callable[[int], None], on_end: Callable[[EndedRequest], None]
    ) -> None:
        """Wrap `app`.

        `on_response` is called with the status of every response as it begins, `on_end` after every request.
        """
        self._app = app
        self._on_response = on_response
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = monotonic()
        sent = Headers(scope=scope)
        request_id = _get_request_id(sent)
        state = scope.setdefault("state", {})
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if ignored := state.get("ignored_fields"):
                    headers["x-ignored-fields"] = ignored
                status = message["status"]
                self._on_response(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:  # the response has begun: uvicorn closes the connection
                state["error"] = to_api_error(error)
                raise
            await make_error_response(Request(scope), error)(scope, receive, send_with_id)
        finally:
            if status is None:
                status = CLIENT_CLOSED_REQUEST
                self._on_response(status)
            self._on_end(
                EndedRequest(
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["raw_path"].decode("latin-1"),
                    route=scope["path"],
                    headers=sent,
                    status=status,
                    error=state.get("error"),
                    generation=state.get("generation"),
                    start_time=began,
                    end_time=monotonic(),
                )
            )
            state.clear()  # frees the prompts: uvicorn keeps the scope until the connection's next request


def _get_request_id(headers: Headers) -> str:
    theirs = headers.get("x-request-id", "")
    return theirs if _VALID_REQUEST_ID.fullmatch(theirs) else uuid.uuid4().hex


# ---------------------------------------------------------------- limits of headers and bodies
@dataclass
class InflightBodies:
    """The number of bytes of all bodies that are being received, decoded and tokenised in this process."""

    num_bytes: int = 0

    def take(self, count: int, most: int) -> None:
        """Add `count` bytes. Raises ApiError 429 if the sum would be more than `most`."""
        if self.num_bytes + count > most:
            message = "the bodies of other requests take all the memory that bodies may have; try again"
            raise ApiError(429, message, code="inflight_bodies_full")
        self.num_bytes += count


@dataclass(frozen=True)
class BodyLimits:
    """Most bytes of one body and of all in flight; `is_final` is false until the engine's context length is known."""

    max_body_bytes: int
    max_inflight_body_bytes: int
    is_final: bool = True

    def make_body_error(self) -> ApiError:
        """Return the error for a body that is longer than `max_body_bytes`; 503 if that limit is not final."""
        if not self.is_final:
            return ApiError(503, "the engine is not ready; try again", code="engine_unavailable")
        return ApiError(
            413, f"the body is longer than {self.max_body_bytes} bytes; send less in one request", code="body_too_long"
        )


class BodyLimitMiddleware:
    """Middleware that refuses headers that are too long; reading a body beyond its limits raises ApiError."""

    def __init__(
        self, app: ASGIApp, max_header_bytes: int, body_limits: Callable[[], BodyLimits], body_timeout: float
    ) -> None:
        """Wrap `app`; `body_limits` is called for each request, as the limits follow the engine's context length."""
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._body_limits = body_limits
        self._body_timeout = body_timeout
        self._inflight = InflightBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limits = self._body_limits()
        refusal = self._find_refusal(scope, limits)
        if refusal is not None:
            return await make_error_response(Request(scope), refusal)(scope, receive, send)
        body = BoundedBody(receive, limits, self._body_timeout, self._inflight)
        scope.setdefault("state", {})["body"] = body
        try:
            await self._app(scope, body, send)
        finally:
            body.release()

    def _find_refusal(self, scope: Scope, limits: BodyLimits) -> ApiError | None:
        if count_header_bytes(scope) > self._max_header_bytes:
            return make_headers_error(self._max_header_bytes)
        if int(Headers(scope=scope).get("content-length", 0)) > limits.max_body_bytes:
            return limits.make_body_error()
        return None


def count_header_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


def release_body(scope: Scope) -> None:
    """Stop counting a request's body among those in flight, once it has become tokens."""
    if (body := scope["state"].get("body")) is not None:
        body.release()


@dataclass
class BoundedBody:
    """An ASGI `receive` that raises ApiError for a body that is too long, stops, or is large and comes too slowly.

    After the end of the body there is no timeout.
    """

    receive: Receive
    limits: BodyLimits
    timeout: float
    inflight: InflightBodies
    num_received_bytes: int = 0
    num_counted_bytes: int = 0  # those beyond UNCOUNTED_BYTES
    complete: bool = False
    start_time: float = field(default_factory=monotonic)

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(None if self.complete else self._seconds_left()):
                message = await self.receive()
        except TimeoutError:
            raise ApiError(408, "nothing more of the body came in time", code="body_timeout") from None
        count = len(message.get("body", b""))
        self.num_received_bytes += count
        self.complete = self.complete or not message.get("more_body", False)
        if self.num_received_bytes > self.limits.max_body_bytes:
            raise self.limits.make_body_error()
        self._count(min(count, self.num_received_bytes - UNCOUNTED_BYTES))
        return message

    def _seconds_left(self) -> float:
        """Return how many seconds to wait for the next piece of the body."""
        if not self.num_counted_bytes:
            return self.timeout
        return min(
            self.timeout, self.start_time + self.timeout + self.num_received_bytes / MIN_BYTES_PER_SECOND - monotonic()
        )

    def _count(self, more: int) -> None:
        if more > 0:
            self.inflight.take(more, self.limits.max_inflight_body_bytes)
            self.num_counted_bytes += more

    def release(self) -> None:
        """Stop counting this body's bytes as in flight; may be called more than once."""
        self.inflight.num_bytes -= self.num_counted_bytes
        self.num_counted_bytes = 0


def make_body_limits_getter(settings: Settings, client: EngineClient) -> Callable[[], BodyLimits]:
    """Return a function that returns the limits of bodies: they depend on the context length of the current engine."""
    hello: Hello | None = None
    limits: BodyLimits | None = None

    def get_body_limits() -> BodyLimits:
        nonlocal hello, limits
        if limits is None or hello is not client.hello:
            hello = client.hello
            one, together = settings.compute_body_limits(0 if hello is None else hello.max_seq_len)
            limits = BodyLimits(one, together, is_final=hello is not None or settings.max_body_bytes is not None)
        return limits

    return get_body_limits


# ---------------------------------------------------------------- path
class UnversionedPathMiddleware:
    """Middleware that accepts the routes under /v1 without that prefix, for clients whose base URL has none.

    It rewrites the path before `AuthenticationMiddleware` looks at it, so that both spellings need the same key. The
    log has the path as the client sent it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_unversioned(scope["path"]):
            scope["path"] = API_PREFIX + scope["path"]
        await self._app(scope, receive, send)


def _is_unversioned(path: str) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in UNVERSIONED_ROUTES)


# ---------------------------------------------------------------- authentication
class AuthenticationMiddleware:
    """Middleware that checks API keys, other tokens and ports, before any part of a body is read.

    An API key opens the paths of API_KEY_PREFIXES; the admin token opens only the administration of caches, roll-outs
    and profiles, the live view, and what describes instances, settings and roll-outs; the metrics key opens /metrics.
    Without API keys every request is let in; without an admin token there is no administration, and only clients on
    this machine may watch the live view. With a `metrics_port`, /metrics is only on that port; /health and /ready are
    on both ports.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str] | None,
        admin_token: str | None,
        metrics_key: str | None = None,
        metrics_port: int | None = None,
    ) -> None:
        self._app = app
        self._metrics_key = metrics_key
        self._metrics_port = metrics_port
        self._api_keys = None if api_keys is None else tuple(api_keys)
        self._admin_token = admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _read_x_api_key(scope)
        refusal = self._find_refusal(scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else make_error_response(Request(scope), refusal)
        await app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> HTTPException | None:
        if not self._is_on_its_port(scope):
            return HTTPException(404)
        sent = Headers(scope=scope).get("authorization", "")
        if scope["path"] == METRICS_PATH and self._metrics_key is not None:
            return _check_token(sent, [self._metrics_key], "the metrics key")
        if _is_administration(scope):
            if self._admin_token is None:
                return ApiError(403, "administration is off: start the server with an admin_token", code="admin_off")
            return _check_token(sent, [self._admin_token], "the admin token")
        if scope["path"].startswith(LIVE_PATH):
            if self._admin_token is None:
                return find_local_refusal(scope)
            return _check_token(sent, [self._admin_token], "the admin token")
        if scope["path"].startswith(API_KEY_PREFIXES) and self._api_keys is not None:
            return _check_token(sent, (*self._api_keys, *self._get_reading_tokens(scope)), "an API key of this server")
        return None

    def _get_reading_tokens(self, scope: Scope) -> tuple[str, ...]:
        """Return the tokens that open a path beside API keys: the admin token, where it only describes the server."""
        describes = scope["path"].startswith((ROLLOUTS_PATH, FIDELITY_PATH)) or scope["path"] in DESCRIBING_PATHS
        return (self._admin_token,) if describes and self._admin_token is not None else ()

    def _is_on_its_port(self, scope: Scope) -> bool:
        if self._metrics_port is None or scope["path"] in SHARED_PATHS:
            return True
        _, port = scope["server"]
        return bool((port == self._metrics_port) == (scope["path"] == METRICS_PATH))


def _read_x_api_key(scope: Scope) -> None:
    """Write the header X-Api-Key, in which Anthropic's clients send keys, as Authorization, unless both are there."""
    headers = Headers(scope=scope)
    if (key := headers.get("x-api-key")) is not None and "authorization" not in headers:
        scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {key}".encode("latin-1"))]


def _is_administration(scope: Scope) -> bool:
    """Return whether a request needs the admin token: for caches, for profiles, or to change roll-outs or requests."""
    path = scope["path"]
    changes = path.startswith((ROLLOUTS_PATH, LIVE_PATH)) and scope["method"] not in READING_METHODS
    return changes or path.startswith((ADMIN_PREFIX, PROFILE_PATH))


def _check_token(authorization: str, allowed: Iterable[str], what: str) -> ApiError | None:
    """Return None if an allowed token was sent, else an error that asks for `what`; compares in constant time."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("latin-1")  # the bytes of the header as the client sent them
    same = [hmac.compare_digest(given, each.encode()) for each in allowed]
    is_bearer = scheme.lower() == "bearer"
    if is_bearer and any(same):
        return None
    wrong = "the token that was sent is wrong: " if is_bearer and given else ""
    return ApiError(401, f"{wrong}send {what}: 'Authorization: Bearer ...'", code="invalid_api_key")


def make_security_dependency(scheme: str) -> Depends:
    """Return a FastAPI dependency that checks nothing: openapi.json shows by it which key a route needs."""
    dependency: Depends = Security(HTTPBearer(scheme_name=scheme, auto_error=False))
    return dependency
