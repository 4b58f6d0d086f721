"""What a request may be and take: bytes of headers, bytes of a body, seconds between two pieces of it.

Knows no endpoint. What never becomes a request is bounded before, in server/api/connection.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError, answer


class Bounds:
    """Middleware. Headers are refused here; for a body, whoever reads it gets an ApiError."""

    def __init__(self, app: ASGIApp, max_header_bytes: int, max_body_bytes: int, body_timeout: float) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await answer(Request(scope), refusal)(scope, receive, send)
        await self._app(scope, BoundedBody(receive, self._max_body_bytes, self._body_timeout), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if header_bytes(scope) > self._max_header_bytes:
            return too_long_headers(self._max_header_bytes)
        if int(Headers(scope=scope).get("content-length", 0)) > self._max_body_bytes:
            return too_long_body(self._max_body_bytes)
        return None


def header_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


def too_long_headers(most: int) -> ApiError:
    return ApiError(431, f"the headers are longer than {most} bytes; send less in them", code="headers_too_long")


def too_long_body(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes; send less in one request", code="body_too_long")


@dataclass
class BoundedBody:
    """A `receive` that raises ApiError for a body which is too long or stands still. Its end is not awaited in vain."""

    receive: Receive
    max_bytes: int
    timeout: float
    got: int = 0
    complete: bool = False

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(None if self.complete else self.timeout):
                message = await self.receive()
        except TimeoutError:
            raise ApiError(
                408, f"nothing more of the body came for {self.timeout:g} seconds", code="body_timeout"
            ) from None
        self.got += len(message.get("body", b""))
        self.complete = self.complete or not message.get("more_body", False)
        if self.got > self.max_bytes:
            raise too_long_body(self.max_bytes)
        return message
