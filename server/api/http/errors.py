"""OpenAI's error object, for everything that goes wrong: {"error": {"message", "type", "param", "code"}}.

If OpenAI's clients would retry after a status where that cannot help, a header tells them not to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from config.wording import explain_problem, format_value
from server.api.http.json_body import PathError
from server.engine.ipc.client import EngineLost, EngineRefused
from server.engine.ipc.messages import Failed
from server.text.errors import TextError, TextRefused, TextUnavailable

Location: TypeAlias = tuple[str | int, ...]  # a place in a body: names of members, and indices of items

RETRY_HEADERS = {"Retry-After": "1"}  # seconds until a client may retry, where the error has no estimate
NO_RETRY_HEADERS = {"x-should-retry": "false"}  # keeps OpenAI's clients from repeating the request
STATUS_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: NO_RETRY_HEADERS,
    409: NO_RETRY_HEADERS,
    415: {"Accept-Encoding": "identity"},  # RFC 9110, 15.5.16
    429: RETRY_HEADERS,
    503: RETRY_HEADERS,
    504: NO_RETRY_HEADERS,
}
LASTING_CODES = ("strategy_disabled",)  # codes of errors that last until the server is started again
MAX_PROBLEMS = 5  # most problems of a body that one error message names
MAX_FIELD_LENGTH = 100  # most characters of a field's name in an error
MAX_MESSAGE_LENGTH = 1000  # most characters of an error message, which may quote a client or a chat template
TYPE_NAMES: Mapping[type, str] = {bool: "a boolean", int: "a number", float: "a number", str: "a text"}
EMPTY = '""'  # how an error message writes a field whose name is empty
MAX_PATH_LENGTH = 200  # most characters of a URL's path in an error
NO_ROUTE = "there is no such route"  # logged instead of the path, which may contain line breaks
QUOTING_CODES = ("unknown_kv_cache", "not_found")  # codes of engine errors whose messages quote the client
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")  # of all routes
METHODS_OF_FILES = ["GET", "HEAD"]  # of mounted folders, whose methods the framework does not list


class ErrorDetails(BaseModel):
    """The object under "error" in a response: what went wrong, in which field of the request, as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every response with a status from 400 on."""

    error: ErrorDetails


class ApiError(HTTPException):
    """An error with its HTTP status; the message tells the client what to change.

    `log_message` is logged instead of a message that quotes what the client sent; `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        log_message: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}..."
        super().__init__(status, message, NO_RETRY_HEADERS if code in LASTING_CODES else STATUS_HEADERS.get(status))
        if retry_after is not None:
            self.headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
        self.message = message
        self.log_message = message if log_message is None else log_message
        self.param = param if param is None else param[:MAX_FIELD_LENGTH]
        self.code = code

    def encode(self) -> bytes:
        error = {"message": self.message, "type": self._get_type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def _get_type(self) -> str:
        if self.status_code >= 500:
            return "server_error"
        return "rate_limit_error" if self.status_code == 429 else "invalid_request_error"


def make_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's entries for errors with these and all other statuses: the `responses` of a route or router."""
    return {status: {"model": Error} for status in statuses} | {"default": {"model": Error}}


def make_engine_error(event: Failed) -> ApiError:
    logged = "there is none of that name" if event.code in QUOTING_CODES else None
    return ApiError(
        event.status,
        event.message,
        param=event.param,
        code=event.code,
        log_message=logged,
        retry_after=event.retry_after,
    )


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client gets for an exception, except for the framework's HTTPException."""
    match error:
        case ApiError():
            return error
        case EngineRefused():
            return make_engine_error(error.error)
        case EngineLost():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=error.retry_after)
        case TextRefused():
            return ApiError(400, str(error), code=error.code, log_message=error.code or "a text that cannot be read")
        case TextUnavailable():
            return ApiError(503, str(error), code="text_unavailable")
        case RequestValidationError():
            return _make_validation_error(error.errors())
    api_error = ApiError(500, "internal error; the server's log tells more", log_message="an unexpected exception")
    api_error.__cause__ = error  # for the log
    return api_error


def add_exception_handlers(app: FastAPI) -> None:
    """Register the handler of expected exceptions; `RequestLifecycleMiddleware` answers the others."""
    for kind in (HTTPException, RequestValidationError, EngineRefused, EngineLost, TextError):
        app.add_exception_handler(kind, _handle_exception)


async def _handle_exception(request: Request, error: Exception) -> Response:
    return make_error_response(request, error)


def make_error_response(request: Request, error: Exception) -> Response:
    """Return the response to an exception.

    Middleware sends this response itself: the response to an exception that it raised would lack the CORS headers.
    """
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        api_error = _convert_http_exception(error, request)
    else:
        api_error = to_api_error(error)
    request.state.error = api_error  # for the log
    return Response(api_error.encode(), api_error.status_code, api_error.headers, "application/json")


def _convert_http_exception(error: HTTPException, request: Request) -> ApiError:
    """Return an ApiError for an HTTPException that the web framework raised itself."""
    called = f"{request.method} {request.scope['path'][:MAX_PATH_LENGTH]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no {called}; check the URL", code="unknown_url", log_message=NO_ROUTE)
    if error.status_code == 405:
        allowed = _find_allowed_methods(request) or METHODS_OF_FILES
        message = f"there is no {called}; use {' or '.join(allowed)}"
        refused = ApiError(405, message, code="method_not_allowed", log_message=NO_ROUTE)
        refused.headers = {"Allow": ", ".join(allowed)}
        return refused
    return ApiError(error.status_code, error.detail)


def _find_allowed_methods(request: Request) -> list[str]:
    """Return the HTTP methods of all routes of a request's path; the framework names those of the first route only."""
    routes = request.app.routes
    return [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


# ---------------------------------------------------------------- bodies that were refused
def make_body_error(
    error: ValidationError, suggestions: Mapping[str, str], find_field: Callable[[Location], Location] = tuple
) -> ApiError:
    """Return the error for a body that its model refuses; `suggestions` has hints for unknown fields, by path.

    `find_field` returns the place in the body that was sent of a place in the one that was checked, if they differ.
    """
    problems = [
        {**problem, "loc": ("body", *find_field((*problem["loc"], *_get_further_path(problem))))}
        for problem in error.errors(include_url=False)
    ]
    return _make_validation_error(problems, suggestions)


def _get_further_path(problem: Mapping[str, Any]) -> Location:
    """Return the path from the place of a problem to what is wrong there; empty unless a PathError says more."""
    cause = problem.get("ctx", {}).get("error")
    return cause.path if isinstance(cause, PathError) else ()


def _make_validation_error(
    problems: Sequence[Mapping[str, Any]], suggestions: Mapping[str, str] = MappingProxyType({})
) -> ApiError:
    """Return an error with the first few problems, missing fields before all; `param` is the field of the first."""
    problems = sorted(problems, key=lambda problem: problem["type"] != "missing")
    message = "; ".join(_format_problem(problem, suggestions) for problem in problems[:MAX_PROBLEMS])
    message += f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    logged = "; ".join(
        f"{_format_known_field(problem) or 'the body'}: {problem['type']}" for problem in problems[:MAX_PROBLEMS]
    )
    return ApiError(400, message, param=_format_field(problems[0]), log_message=logged)


def _format_problem(problem: Mapping[str, Any], suggestions: Mapping[str, str]) -> str:
    field = _format_field(problem)
    if field is None and problem["type"] == "value_error":
        return f"the body {problem['ctx']['error']}"
    if field is None:
        return "send a JSON object, with the header Content-Type: application/json"
    if problem["type"] == "extra_forbidden":
        path = ".".join(part for part in problem["loc"][1:] if isinstance(part, str))
        return f"{field} is not a parameter of this endpoint{suggestions.get(path) or '; remove it'}"
    return explain_problem(field, problem, value=_format_sent_value(problem), table="an object")


def _format_sent_value(problem: Mapping[str, Any]) -> str:
    """Return the value that was sent, or only its type if 0 or "" may stand for a value that was not decoded."""
    sent = problem["input"]
    if problem["type"].endswith("_type") and sent in (0, ""):
        return TYPE_NAMES[type(sent)]
    return format_value(sent)


def _format_field(problem: Mapping[str, Any]) -> str | None:
    """Return a problem's location as a field: ('body', 'stop', 1) is stop[1]; None for the body as a whole."""
    path = problem["loc"][1:]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:MAX_FIELD_LENGTH] or EMPTY}" for part in path)
    return name.removeprefix(".")[:MAX_FIELD_LENGTH] or None


def _format_known_field(problem: Mapping[str, Any]) -> str | None:
    """Return a problem's field for the log; for an unknown field only its parent, as the client chose its name."""
    return _format_field({"loc": problem["loc"][:-1]} if problem["type"] == "extra_forbidden" else problem)


def make_headers_error(limit: int) -> ApiError:
    """Return the error for a request whose request line and headers are longer than `limit` bytes."""
    return ApiError(431, f"the headers are longer than {limit} bytes; send less in them", code="headers_too_long")
