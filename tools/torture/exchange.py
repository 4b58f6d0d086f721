"""Sends a request and returns its outcome: an answer, a part of one, or a failure of some kind.

Knows HTTP and the shape of errors; checker.py decides which failures are allowed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx

from tools.torture.answers import Answer
from tools.torture.requests import MODEL, RequestSpec, SendOptions

# Kinds of failures: those that the server does not report, then codes of its errors, then malformed responses.
REFUSED, CONNECTION_CUT, NO_ANSWER = "connection refused", "connection cut", "no answer"
ENGINE_UNAVAILABLE, TEXT_UNAVAILABLE, STOPPING = "engine_unavailable", "text_unavailable", "server_stopping"
UNFINISHED = "stream without [DONE]"
MALFORMED_ERROR = "error without OpenAI's shape"
MALFORMED_ANSWER = "answer without OpenAI's shape"
INTERNAL = "internal error"
ERROR_FIELDS = {"message", "type", "param", "code"}  # of OpenAI's error object
RETRY_STATUSES = (429, 503)  # statuses that must have Retry-After


@dataclass(frozen=True)
class Failure:
    """The reason why a request has no complete answer."""

    kind: str  # an error's code, or one of the names above
    message: str
    status: int | None = None  # None: no response, or an error within a stream


@dataclass
class Outcome:
    """The result of a request. Times are monotonic seconds."""

    began: float
    ended: float = 0.0
    answer: Answer = field(default_factory=Answer)
    failure: Failure | None = None
    status: int | None = None
    client_left: bool = False  # whether the client disconnected on purpose


class ExchangeFailed(Exception):
    """Raised within an exchange to end it with a failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class HttpClient:
    """An HTTP client that counts responses by status."""

    def __init__(self, http: httpx.AsyncClient, timeout: float, statuses: Counter[int]) -> None:
        self.statuses = statuses
        self._http = http
        self._timeout = timeout

    async def send(self, url: str, spec: RequestSpec, options: SendOptions) -> Outcome:
        """Send a generation request with these options; return its outcome."""
        outcome = Outcome(monotonic())
        request = self._http.build_request(
            "POST", url + spec.path, json=make_body(spec, options), headers=make_headers(options), timeout=None
        )
        await self._run_exchange(self._generate(request, options, outcome), outcome)
        return outcome

    async def call(
        self, method: str, url: str, *, content: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Outcome, bytes]:
        """Send any other request; return its outcome, and the body of a response below 400."""
        outcome = Outcome(monotonic())
        request = self._http.build_request(method, url, json=content, headers=headers, timeout=None)
        received = bytearray()

        async def receive() -> None:
            answer = await self._http.send(request)
            self._check_status(answer.status_code, answer.headers, answer.content, outcome)
            received.extend(answer.content)

        await self._run_exchange(receive(), outcome)
        return outcome, bytes(received)

    async def _run_exchange(self, exchange: Any, outcome: Outcome) -> None:
        """Await an exchange, and store its failure and the end time in the outcome."""
        try:
            async with asyncio.timeout(self._timeout):
                await exchange
        except TimeoutError:
            outcome.failure = Failure(NO_ANSWER, f"neither an answer nor an error within {self._timeout:g} s")
        except ExchangeFailed as failed:
            outcome.failure = failed.failure
        except httpx.ConnectError as error:
            outcome.failure = Failure(REFUSED, repr(error))
        except httpx.TransportError as error:
            outcome.failure = Failure(CONNECTION_CUT, repr(error))
        except (ValueError, KeyError, TypeError) as error:
            outcome.failure = Failure(MALFORMED_ANSWER, repr(error), outcome.status)
        outcome.ended = monotonic()

    async def _generate(self, request: httpx.Request, options: SendOptions, outcome: Outcome) -> None:
        try:
            async with asyncio.timeout(options.leave_seconds):
                await self._receive(request, options, outcome)
        except TimeoutError:
            if options.leave_seconds is None:
                raise
            outcome.client_left = True

    async def _receive(self, request: httpx.Request, options: SendOptions, outcome: Outcome) -> None:
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200 or not options.stream:
                content = await response.aread()
                self._check_status(response.status_code, response.headers, content, outcome)
                outcome.answer.take(json.loads(content))
            else:
                self._check_status(200, response.headers, b"", outcome)
                await self._read_stream(response, options, outcome)
        finally:
            await response.aclose()

    async def _read_stream(self, response: httpx.Response, options: SendOptions, outcome: Outcome) -> None:
        events = 0
        async for data in _iter_events(response.aiter_bytes()):
            if options.leave_after is not None and events >= options.leave_after:
                outcome.client_left = True
                return
            if data == b"[DONE]":
                return
            body = json.loads(data)
            if "error" in body:
                raise ExchangeFailed(_parse_failure(None, body))
            outcome.answer.take(body)
            events += 1
        raise ExchangeFailed(Failure(UNFINISHED, f"the stream ended after {events} events"))

    def _check_status(self, status: int, headers: Mapping[str, str], content: bytes, outcome: Outcome) -> None:
        """Store and count the status; raise ExchangeFailed if it is an error."""
        outcome.status = status
        self.statuses[status] += 1
        if status < 400:
            return
        try:
            failure = _parse_failure(status, json.loads(content))
        except ValueError:
            failure = Failure(MALFORMED_ERROR, f"{status} {content[:200]!r}", status)
        if status in RETRY_STATUSES and "retry-after" not in headers:
            failure = Failure(MALFORMED_ERROR, f"{status} without Retry-After: {failure.message}", status)
        raise ExchangeFailed(failure)


async def _iter_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events. Lines end at line feeds only, not at other Unicode line separators."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")


def _parse_failure(status: int | None, body: Any) -> Failure:
    """Return the failure that an error object describes."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or error.keys() != ERROR_FIELDS or not error["message"]:
        return Failure(MALFORMED_ERROR, f"{status} {body!r}", status)
    plain = INTERNAL if error["type"] == "server_error" else f"refused with {status}"
    return Failure(error["code"] or plain, error["message"], status)


# ---------------------------------------------------------------- making requests
def make_body(spec: RequestSpec, options: SendOptions) -> dict[str, Any]:
    body = {"model": MODEL, **spec.body, **options.extra_body}
    if options.stream:
        body["stream"] = True
    if options.named_by == "body":
        body["kv_cache"] = options.instance
    elif options.named_by == "model":
        body["model"] = f"{MODEL}:{options.instance}"
    return body


def make_headers(options: SendOptions) -> dict[str, str]:
    chosen = {"X-KV-Cache": options.instance} if options.named_by == "header" else {}
    return {"Authorization": f"Bearer {options.api_key}"} | chosen
