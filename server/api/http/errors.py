"""OpenAI's error object, for everything that goes wrong: {"error": {"message", "type", "param", "code"}}.

A client's mistake never makes clients try again: where they would because of the status, a header says no.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from server.api.http.json_values import shown
from server.engine.ipc.client import EngineLost, EngineRefused
from server.engine.ipc.messages import Failed
from server.text.errors import TextError, TextRefused, TextUnavailable

RETRY = {"Retry-After": "1"}  # seconds, where nothing better is known
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients ask again after these otherwise
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 408: NO_RETRY, 409: NO_RETRY, 429: RETRY, 503: RETRY, 504: NO_RETRY}
MOST_PROBLEMS = 5  # of a body, that its error tells
LONGEST_FIELD = 100  # characters of a field's name in an error
LONGEST_MESSAGE = 1000  # characters of an error: it may quote what a client sent, or what a chat template says
KINDS: Mapping[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a text"}
EMPTY = '""'  # how a field without a name is told
LONGEST_PATH = 200  # characters of a path in an error
NO_ROUTE = "there is no such route"  # in the log, which has the path as it came: unquoted it may have line breaks
QUOTING = ("unknown_kv_cache", "not_found")  # codes of the engine's, whose messages have a client's words
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")  # that any route of ours has


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every answer from 400 on."""

    error: ErrorDetails


class ApiError(HTTPException):
    """An error with its HTTP status; the message tells the client what to change.

    `logged` is for the log, where the message quotes what the client sent; `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        logged: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}..."
        super().__init__(status, message, HEADERS.get(status))
        if retry_after is not None:
            self.headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
        self.message = message
        self.logged = message if logged is None else logged
        self.param = param if param is None else param[:LONGEST_FIELD]
        self.code = code

    def body(self) -> bytes:
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def _type(self) -> str:
        if self.status_code >= 500:
            return "server_error"
        return "rate_limit_error" if self.status_code == 429 else "invalid_request_error"


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of these errors, and of any other, for the `responses` of a route or a router."""
    return {status: {"model": Error} for status in statuses} | {"default": {"model": Error}}


def from_engine(event: Failed) -> ApiError:
    logged = "there is none of that name" if event.code in QUOTING else None
    return ApiError(
        event.status,
        event.message,
        param=event.param,
        code=event.code,
        logged=logged,
        retry_after=event.retry_after,
    )


def as_api_error(error: Exception) -> ApiError:
    """Return the error that a client gets for any exception but the framework's own."""
    match error:
        case ApiError():
            return error
        case EngineRefused():
            return from_engine(error.refused)
        case EngineLost():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=error.retry_after)
        case TextRefused():
            return ApiError(400, str(error), code=error.code, logged=error.code or "a text that cannot be read")
        case TextUnavailable():
            return ApiError(503, str(error), code="text_unavailable")
        case RequestValidationError():
            return _invalid(error.errors())
    api_error = ApiError(500, "internal error; the server's log tells more", logged="an unexpected exception")
    api_error.__cause__ = error  # for the log
    return api_error


def install(app: FastAPI) -> None:
    """Answer exceptions that are expected; request_lifetime.py answers the others."""
    for kind in (HTTPException, RequestValidationError, EngineRefused, EngineLost, TextError):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    return answer(request, error)


def answer(request: Request, error: Exception) -> Response:
    """Return the response to an exception.

    Middleware sends it itself: an exception it raises would lose the headers of CORS.
    """
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        api_error = _from_framework(error, request)
    else:
        api_error = as_api_error(error)
    request.state.error = api_error  # for the log
    return Response(api_error.body(), api_error.status_code, api_error.headers, "application/json")


def _from_framework(error: HTTPException, request: Request) -> ApiError:
    """Return our error for one that the framework raised itself."""
    called = f"{request.method} {request.scope['path'][:LONGEST_PATH]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {called}; check the URL", code="unknown_url", logged=NO_ROUTE)
    if error.status_code == 405:
        allowed = _allowed(request)
        message = f"there is no {called}; use {' or '.join(allowed)}"
        refused = ApiError(405, message, code="method_not_allowed", logged=NO_ROUTE)
        refused.headers = {"Allow": ", ".join(allowed)}
        return refused
    return ApiError(error.status_code, error.detail)


def _allowed(request: Request) -> list[str]:
    """Return the methods of every route of a path; the framework names those of the first route only."""
    routes = request.app.routes
    return [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


# ---------------------------------------------------------------- fields that were refused
def refused_body(error: ValidationError, suggestions: Mapping[str, str]) -> ApiError:
    """Return the error for a body that does not fit its model; `suggestions` are for its unknown fields, by path."""
    problems = error.errors(include_url=False, include_context=False)
    return _invalid([problem | {"loc": ("body", *problem["loc"])} for problem in problems], suggestions)


def _invalid(problems: Sequence[Mapping[str, Any]], suggestions: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return an error with the first few problems, missing fields before all; `param` is the field of the first."""
    problems = sorted(problems, key=lambda problem: problem["type"] != "missing")
    message = "; ".join(_explained(problem, suggestions) for problem in problems[:MOST_PROBLEMS])
    message += f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    logged = "; ".join(
        f"{_field_of_ours(problem) or 'the body'}: {problem['type']}" for problem in problems[:MOST_PROBLEMS]
    )
    return ApiError(400, message, param=_field(problems[0]), logged=logged)


def _explained(problem: Mapping[str, Any], suggestions: Mapping[str, str]) -> str:
    field = _field(problem)
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "should be")
    if field is None and problem["type"] == "value_error":
        return f"the body {message}"
    if field is None:
        return "send a JSON object, with the header Content-Type: application/json"
    match problem["type"]:
        case "missing":
            return f"{field} is required"
        case "extra_forbidden":
            path = ".".join(part for part in problem["loc"][1:] if isinstance(part, str))
            return f"{field} is not a parameter of this endpoint{suggestions.get(path) or '; remove it'}"
    return f"{field}: {message}{_instead(problem)}"


def _instead(problem: Mapping[str, Any]) -> str:
    """Return what was sent, as the end of a sentence; nothing where the message says it, or is one of our own."""
    kind, sent = problem["type"], problem["input"]
    if kind in ("string_too_long", "string_too_short"):
        return f", not {len(sent)}"
    if kind in ("value_error", "too_long", "too_short"):
        return ""
    if kind.endswith("_type") and sent in (0, ""):  # perhaps of a field that is not decoded
        return f", not {KINDS[type(sent)]}"
    return f", not {shown(sent)}"


def _field(problem: Mapping[str, Any]) -> str | None:
    """Return the field of a location: ('body', 'stop', 1) is stop[1]; None for the body as a whole."""
    path = problem["loc"][1:]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:LONGEST_FIELD] or EMPTY}" for part in path)
    return name.removeprefix(".")[:LONGEST_FIELD] or None


def _field_of_ours(problem: Mapping[str, Any]) -> str | None:
    """Return the field of a problem without names that are not ours: they may hold anything that was sent."""
    return _field({"loc": problem["loc"][:-1]} if problem["type"] == "extra_forbidden" else problem)
