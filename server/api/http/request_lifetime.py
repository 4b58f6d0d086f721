"""A request from its headers to its end: the middleware around all others.

Gives every response the header x-request-id, the client's own or a new one, and x-ignored-fields where fields of the
body have no effect; reports its status as it begins, and 499 where none did; answers unexpected exceptions; and reports
how every request ended. Knows neither endpoints nor what becomes of the reports.

Plain ASGI, as Starlette's BaseHTTPMiddleware would hide disconnects.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.http.errors import make_error_response, to_api_error
from server.api.ops.request_outcome import CLIENT_CLOSED_REQUEST, Ended

_VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Lifetime:
    """Middleware that reports each response and the end of each request.

    The application leaves in the state its `error`, its `generation` and the `ignored_fields` of the body.
    """

    def __init__(self, app: ASGIApp, on_response: Callable[[int], None], on_end: Callable[[Ended], None]) -> None:
        """Wrap `app`.

        `on_response` is called with the status of every response as it begins, `on_end` after every request.
        """
        self._app = app
        self._on_response = on_response
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.monotonic()
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
            if status is not None:  # too late: uvicorn cuts the connection
                state["error"] = to_api_error(error)
                raise
            await make_error_response(Request(scope), error)(scope, receive, send_with_id)
        finally:
            if status is None:
                status = CLIENT_CLOSED_REQUEST
                self._on_response(status)
            self._on_end(
                Ended(
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["raw_path"].decode("latin-1"),
                    route=scope["path"],
                    headers=sent,
                    status=status,
                    error=state.get("error"),
                    generation=state.get("generation"),
                    start_time=began,
                    end_time=time.monotonic(),
                )
            )
            state.clear()  # uvicorn keeps the scope until the connection's next request, and with it the prompts


def _get_request_id(headers: Headers) -> str:
    theirs = headers.get("x-request-id", "")
    return theirs if _VALID_REQUEST_ID.fullmatch(theirs) else uuid.uuid4().hex
