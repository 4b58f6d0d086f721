"""Sends a request and returns its outcome: an answer, a part of one, or a failure of some kind.

Knows HTTP and the shape of errors; checker.py decides which failures are allowed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx

from loadtest.stream import iter_lines
from tools.torture.answers import Answer
from tools.torture.requests import RequestSpec, SendOptions, make_body, make_headers

TIMEOUT_SECONDS = 90.0  # after which a request without an answer or an error counts as lost
# Kinds of failures: those that the server does not report, then codes of its errors, then malformed responses.
REFUSED, CONNECTION_CUT, NO_ANSWER = "connection refused", "connection cut", "no answer"
ENGINE_UNAVAILABLE, TEXT_UNAVAILABLE, STOPPING = "engine_unavailable", "text_unavailable", "server_stopping"
UNFINISHED = "stream without [DONE]"
MALFORMED_ERROR = "error without OpenAI's shape"
MALFORMED_ANSWER = "answer without OpenAI's shape"
INTERNAL = "internal error"
ERROR_FIELDS = {"message", "type", "param", "code"}  # of OpenAI's error object
RETRY_STATUSES = (429, 503)  # statuses that must have Retry-After


class Failure(Exception):
    """The reason why a request has no complete answer."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(kind, message, status)
        self.kind = kind  # an error's code, or one of the names above
        self.status = status  # None: no response, or an error within a stream


@dataclass
class Outcome:
    """The result of a request. Times are monotonic seconds."""

    began: float
    ended: float = 0.0
    answer: Answer = field(default_factory=Answer)  # to a generation request
    content: bytes = b""  # the body of a response that is not streamed
    failure: Failure | None = None
    client_left: bool = False  # whether the client disconnected on purpose


def open_http_client() -> httpx.AsyncClient:
    """Open an HTTP client that ignores proxy settings in the environment."""
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None, trust_env=False)


async def generate(http: httpx.AsyncClient, url: str, spec: RequestSpec, options: SendOptions) -> Outcome:
    """Send a generation request with these options; return its outcome."""
    body, headers = make_body(spec, options), make_headers(options)
    return await _send(http, http.build_request("POST", url + spec.path, json=body, headers=headers), options)


async def call(
    http: httpx.AsyncClient, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Outcome:
    """Send any other request; return its outcome."""
    return await _send(http, http.build_request(method, url, json=body, headers=headers), None)


async def _send(http: httpx.AsyncClient, request: httpx.Request, options: SendOptions | None) -> Outcome:
    """Send a request, with the options of a generation request; return its outcome, whatever happens."""
    outcome = Outcome(monotonic())
    leave_seconds = None if options is None else options.leave_seconds
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS if leave_seconds is None else leave_seconds):
            await _receive(http, request, options, outcome)
    except TimeoutError:
        outcome.client_left = leave_seconds is not None
        if not outcome.client_left:
            outcome.failure = Failure(NO_ANSWER, f"neither an answer nor an error within {TIMEOUT_SECONDS:g} s")
    except Failure as failure:
        outcome.failure = failure
    except httpx.TransportError as error:
        kind = REFUSED if isinstance(error, httpx.ConnectError) else CONNECTION_CUT
        outcome.failure = Failure(kind, repr(error))
    except (ValueError, KeyError, TypeError) as error:
        outcome.failure = Failure(MALFORMED_ANSWER, repr(error))
    outcome.ended = monotonic()
    return outcome


async def _receive(
    http: httpx.AsyncClient, request: httpx.Request, options: SendOptions | None, outcome: Outcome
) -> None:
    """Send a request and read the response; raise Failure if it is an error."""
    response = await http.send(request, stream=True)
    try:
        if response.status_code == 200 and options is not None and options.stream:
            await _read_stream(response, outcome)
            return
        content = await response.aread()
        if response.status_code >= 400:
            raise _parse_response(response)
        outcome.content = content
        if options is not None:
            outcome.answer.take(json.loads(content))
    finally:
        await response.aclose()


async def _read_stream(response: httpx.Response, outcome: Outcome) -> None:
    events = 0
    async for line in iter_lines(response.aiter_bytes()):
        if not line.startswith(b"data: "):
            continue
        if (data := line.removeprefix(b"data: ")) == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _parse_error(None, chunk)
        outcome.answer.take(chunk)
        events += 1
    raise Failure(UNFINISHED, f"the stream ended after {events} events")


def _parse_response(response: httpx.Response) -> Failure:
    """Return the failure that an error response describes."""
    status = response.status_code
    try:
        failure = _parse_error(status, response.json())
    except ValueError:
        return Failure(MALFORMED_ERROR, f"{response.content[:200]!r}", status)
    if status in RETRY_STATUSES and "retry-after" not in response.headers:
        return Failure(MALFORMED_ERROR, f"no Retry-After: {failure}", status)
    return failure


def _parse_error(status: int | None, body: Any) -> Failure:
    """Return the failure that an error object describes."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or error.keys() != ERROR_FIELDS or not error["message"]:
        return Failure(MALFORMED_ERROR, f"{body!r}", status)
    plain = INTERNAL if error["type"] == "server_error" else f"refused with {status}"
    return Failure(error["code"] or plain, error["message"], status)
