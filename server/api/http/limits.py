"""Limits of a request: bytes of headers and body, seconds between two pieces of it, bytes of all bodies together.

Knows no endpoint. What never becomes a request is bounded before, in server/api/http/connection.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.http.errors import ApiError, make_error_response

UNCOUNTED_BYTES = 2**16  # bytes of each body: uvicorn buffers as many anyway, and ordinary bodies are never refused
# Bytes a second of a larger body, beside `body_timeout`: it may not hold what others need for ever
MIN_BYTES_PER_SECOND = 2**14


@dataclass
class InflightBodies:
    """The bytes of all bodies that are being received, read and tokenised in this process."""

    num_bytes: int = 0

    def take(self, count: int, most: int) -> None:
        """Count more bytes. Raises ApiError if more than `most` are then held."""
        if self.num_bytes + count > most:
            message = "the bodies of other requests take all the memory that bodies may have; try again"
            raise ApiError(429, message, code="inflight_bodies_full")
        self.num_bytes += count


@dataclass(frozen=True)
class BodyLimits:
    """Bytes of one body and of all together; `is_final` is false until the engine's context length is known."""

    max_body_bytes: int
    max_inflight_body_bytes: int
    is_final: bool = True

    def make_body_error(self) -> ApiError:
        """Return the error for a body that is longer than one may be."""
        if not self.is_final:
            return ApiError(503, "the engine is not ready; try again", code="engine_unavailable")
        return ApiError(
            413, f"the body is longer than {self.max_body_bytes} bytes; send less in one request", code="body_too_long"
        )


class RequestBounds:
    """Middleware that refuses headers, and raises an ApiError where a body is read."""

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


def make_headers_error(most: int) -> ApiError:
    return ApiError(431, f"the headers are longer than {most} bytes; send less in them", code="headers_too_long")


def release_body(scope: Scope) -> None:
    """Stop counting a request's body among those in flight, once it has become tokens."""
    if (body := scope["state"].get("body")) is not None:
        body.release()


@dataclass
class BoundedBody:
    """A `receive` that raises ApiError for a body that is too long, stands still, or is counted and comes too slowly.

    There is no timeout after its end.
    """

    receive: Receive
    limits: BodyLimits
    timeout: float
    inflight: InflightBodies
    num_received_bytes: int = 0
    num_counted_bytes: int = 0  # those of them that count among the bytes in flight
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
        """Return how long more of it may be awaited."""
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
        """Stop counting this body; may be called more than once."""
        self.inflight.num_bytes -= self.num_counted_bytes
        self.num_counted_bytes = 0
