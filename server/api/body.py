"""Reads JSON bodies strictly: no NaN, no bad UTF-8, no bottomless nesting or numbers.

Knows no endpoint: a router gets it as its route_class, and then declares bodies as pydantic models as usual. How long
a body may be, and may take, is seen to before (server/api/bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from server.api.errors import ApiError


class JsonRoute(APIRoute):
    """A route whose JSON body is read by JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return strict


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises ApiError 400 for what is not JSON."""
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(400, "bodies are not unpacked here; send it without Content-Encoding")
        try:
            return msgspec.json.decode(await self.body())
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except UnicodeDecodeError:
            raise ApiError(400, "the body is not UTF-8") from None
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
