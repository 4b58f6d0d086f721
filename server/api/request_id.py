"""Gives every response the header x-request-id: the client's own, or a new one. Knows no endpoint.

Notes the status of the response, too, and tells it: what is within should not look at every message once more.

Plain ASGI, as Starlette's BaseHTTPMiddleware would hide disconnects.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLIENT_LEFT = 499  # before there was a response; nginx's number
_SANE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Middleware; the id is `request.state.request_id`, and `status` is there once a response has begun."""

    def __init__(self, app: ASGIApp, responded: Callable[[int], None]) -> None:
        """`responded` hears the status of every response as it begins."""
        self._app = app
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        theirs = Headers(scope=scope).get("x-request-id", "")
        request_id = theirs if _SANE.fullmatch(theirs) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                state["status"] = message["status"]
                self._responded(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if "status" not in state:
                self._responded(CLIENT_LEFT)
