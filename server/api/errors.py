"""OpenAI's error object, for everything that goes wrong: {"error": {"message", "type", "param", "code"}}.

A client's mistake never gets a status that clients try again (408, 409, 429, 500 and up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from server.engine.client import EngineLost, EngineRefused
from server.engine.messages import Failed

RETRY_AFTER = {"Retry-After": "1"}  # seconds
MOST_PROBLEMS = 5  # of a body, that its error tells
LONGEST_FIELD = 100  # characters of a field's name in an error


class ApiError(HTTPException):
    """An error with its HTTP status; the message tells the client what to change."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, RETRY_AFTER if status in (429, 503) else None)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def _type(self) -> str:
        if self.status_code >= 500:
            return "server_error"
        return "rate_limit_error" if self.status_code == 429 else "invalid_request_error"


def from_engine(event: Failed) -> ApiError:
    return ApiError(event.status, event.message, param=event.param, code=event.code)


def as_api_error(error: Exception, request: Request | None = None) -> ApiError:
    """What the client is told of any exception."""
    match error:
        case ApiError():
            return error
        case EngineRefused():
            return from_engine(error.refused)
        case EngineLost():
            return ApiError(503, str(error), code="engine_unavailable")
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            return _from_http(error, request)
    return ApiError(500, "internal error; the server's log tells more")


def install(app: FastAPI) -> None:
    """Answers every exception with an error object."""
    for kind in (HTTPException, RequestValidationError, EngineRefused, EngineLost, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    told = as_api_error(error, request)
    headers = dict(getattr(error, "headers", None) or told.headers or {})
    headers["x-request-id"] = request.state.request_id  # an unexpected exception passes by the middleware that sets it
    return Response(told.body(), told.status_code, headers, "application/json")


def _from_http(error: HTTPException, request: Request | None) -> ApiError:
    """Of the errors that the framework raises itself."""
    called = f"{request.method} {request.url.path}" if request else "this"
    if error.status_code == 404:
        return ApiError(404, f"there is no {called}; check the URL", code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"there is no {called}; use {allowed}", code="method_not_allowed")
    return ApiError(error.status_code, error.detail)


# ---------------------------------------------------------------- fields that were refused
def _invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Tells the first few problems, what is missing before all; `param` is the field of the first."""
    problems = sorted(problems, key=lambda problem: problem["type"] != "missing")
    told = "; ".join(_explained(problem) for problem in problems[:MOST_PROBLEMS])
    told += f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    return ApiError(400, told, param=_field(problems[0]))


def _explained(problem: Mapping[str, Any]) -> str:
    field = _field(problem)
    if field is None:
        return "send a JSON object, with the header Content-Type: application/json"
    match problem["type"]:
        case "missing":
            return f"{field} is required"
        case "extra_forbidden":
            return f"{field} is not a parameter of this endpoint; remove it"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "should be")
    return f"{field}: {message}"


def _field(problem: Mapping[str, Any]) -> str | None:
    """('body', 'stop', 1) is stop[1]; None for the body as a whole."""
    path = problem["loc"][1:]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{str(part)[:LONGEST_FIELD]}" for part in path)
    return name.lstrip(".")[:LONGEST_FIELD] or None
