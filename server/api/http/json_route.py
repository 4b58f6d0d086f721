"""Routes whose JSON bodies are read strictly: no NaN, no bad UTF-8, no unlimited nesting or numbers.

A router gets JsonRoute as its route_class, and then declares bodies as pydantic models as usual. The length and
the time of a body are limited in server/api/http/middleware.py; json_body.py decodes and checks it. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, get_args

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from server.api.http.errors import ApiError, make_body_error
from server.api.http.json_body import Body, FieldNotes, TooManyValues, decode, replace_half_pairs
from server.api.http.middleware import release_body

LARGE_BODY_BYTES = 2**20  # a body of more bytes takes several milliseconds to decode


class JsonRoute(APIRoute):
    """A route whose JSON body is read by JsonRequest.

    Unknown fields are refused, or ignored if `unknown_fields` of the application's state is "ignore".
    """

    can_ignore_unknown: ClassVar[bool] = True

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model = self._find_body_model()

        async def handle_json(request: Request) -> Response:
            ignores = self.can_ignore_unknown and request.app.state.unknown_fields == "ignore"
            try:
                return await handler(JsonRequest(request, model, ignore_unknown=ignores))
            finally:
                release_body(request.scope)

        return handle_json

    def _find_body_model(self) -> type[Body] | None:
        """Return the model that the body is declared as; None for a route without a body."""
        if self.body_field is None:
            return None
        declared = self.body_field.field_info.annotation
        return next(
            kind for kind in (declared, *get_args(declared)) if isinstance(kind, type) and issubclass(kind, Body)
        )


class StrictJsonRoute(JsonRoute):
    """A JsonRoute that refuses unknown fields in any case."""

    can_ignore_unknown = False


class JsonRequest(Request):
    """A request whose body is freed as soon as it is decoded."""

    def __init__(self, request: Request, model: type[Body] | None, *, ignore_unknown: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model
        self._ignore_unknown = ignore_unknown
        self._received: bytes | None = None

    async def body(self) -> bytes:
        """Return the first byte only: FastAPI keeps it during the request, and only tests whether it is empty."""
        if self._received is None:
            self._received = await super().body()
            del self._body
        return self._received[:1]

    async def json(self) -> Any:
        """Decode and check the body, once; set the state's `ignored_fields` to the names of fields without effect.

        Returns an instance of the route's model, which FastAPI does not check again. Raises ApiError 400 for a body
        that is not JSON or does not fit the model.
        """
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "compressed bodies are not supported; send the body without Content-Encoding")
        await self.body()
        assert self._received is not None, "it was read"
        received, self._received = self._received, b""
        values = self._decode(received)
        if len(received) > LARGE_BODY_BYTES:
            await asyncio.sleep(0)  # lets other requests run between decoding and checking the body
        return values if self._model is None else self._validate(self._model, values)

    def _validate(self, model: type[Body], values: Any) -> Body:
        notes = FieldNotes(self._ignore_unknown)
        try:
            body = model.model_validate(values, context=notes)
        except ValidationError as error:
            raise make_body_error(error, notes.suggestions) from None
        except RecursionError:
            raise _nested_too_deeply() from None
        self.scope["state"]["ignored_fields"] = notes.header_value
        return body

    def _decode(self, body: bytes) -> Any:
        try:
            return decode(body)
        except TooManyValues as error:
            raise ApiError(400, f"the body should have {error}") from None
        except RecursionError:
            raise _nested_too_deeply() from None
        except UnicodeDecodeError:
            raise ApiError(400, "the body is not UTF-8") from None
        except msgspec.DecodeError as error:
            if len(body) <= LARGE_BODY_BYTES and (mended := replace_half_pairs(body)) != body:
                return self._decode(mended)
            raise ApiError(400, f"the body is not JSON: {error}") from None


def _nested_too_deeply() -> ApiError:
    return ApiError(400, "the body is nested too deeply")
