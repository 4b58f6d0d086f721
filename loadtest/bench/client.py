"""The HTTP client of a benchmark: reads the server's model list and version, sends completions, times their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Annotated, Any

import httpx
from msgspec import Meta, Struct
from msgspec.json import decode

from loadtest import listing
from loadtest.bench.types import BenchRequest, Outcome, ServerInfo
from loadtest.bench.vocabulary import make_vocabulary
from loadtest.listing import ListingError, read_listing
from loadtest.prompts import TEXT
from loadtest.stream import Reply, StreamError, format_http_error, iter_lines

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # seconds to wait for a response; long, as requests may queue
PORTS = range(1 << 16)


class Version(Struct):
    version: str


class TokenIds(Struct):
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 22)]]  # token ids; a larger number cannot be one


class ServerError(Exception):
    """The benchmark cannot measure the server; the message says what to change."""


@asynccontextmanager
async def open_client(url: str, api_key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Open an HTTP client for a server's URL, with or without /v1 at its end.

    Ignores proxies in the environment: they would be measured, too. Raises ServerError if the URL or the API key cannot
    be used.
    """
    if not all("!" <= each <= "~" for each in api_key):  # an HTTP header cannot carry other characters
        raise ServerError(
            "--api-key or OPENAI_API_KEY: a key consists of ASCII letters, digits and signs, no spaces or line breaks"
        )
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    try:
        client = httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False)
        if (port := client.base_url.port) is not None and port not in PORTS:
            raise ValueError(f"{port} is not a port: ports are 0 to 65535")
    except (httpx.InvalidURL, ValueError) as error:
        raise ServerError(f"--url {url!r}: {error}") from None
    async with client:
        yield client


async def read_server_info(client: httpx.AsyncClient, model: str = "") -> ServerInfo:
    """Return what the server reports about itself and about `model`; if that is empty, about its first model.

    Raises ServerError if the server does not answer, is not OpenAI-compatible or does not list the model.
    """
    url = str(client.base_url).rstrip("/")
    try:
        answer = await client.get(listing.PATH, params=listing.PARAMS)
        if answer.status_code != 200:
            hint = "; see --api-key" if answer.status_code in (401, 403) else ""
            raise ServerError(
                f"{url} does not list its models: {format_http_error(answer.status_code, answer.text)}{hint}"
            )
        listed = read_listing(answer.content, model)
        return ServerInfo(
            url, listed, await _read_version(client), make_vocabulary(await _tokenize_sample(client, listed.model))
        )
    except httpx.UnsupportedProtocol:
        raise ServerError(f"--url {url}: a URL has to begin with http:// or https://") from None
    except httpx.HTTPError as error:
        raise ServerError(
            f"no server answers at {url} ({_format_error(error)}); start one (kvmux serve), or choose another (--url)"
        ) from None
    except ListingError as error:
        raise ServerError(str(error)) from None
    except ValueError:
        raise ServerError(f"the server at {url} is not OpenAI-compatible; see --url") from None


async def _read_version(client: httpx.AsyncClient) -> str:
    """Return the server's version from GET /version (kvmux, vLLM); empty if the server has no such route."""
    answer = await client.get("/version")
    try:
        return decode(answer.content, type=Version).version if answer.status_code == 200 else ""
    except ValueError:
        return ""


async def _tokenize_sample(client: httpx.AsyncClient, model: str) -> list[int]:
    """Return the token ids of the sample TEXT from POST /tokenize; empty if the server has no such route.

    Tries the request body of kvmux and vLLM first, then that of llama.cpp.
    """
    bodies: tuple[dict[str, Any], ...] = (
        {"model": model, "prompt": TEXT, "add_special_tokens": False},
        {"content": TEXT, "add_special": False},
    )
    for body in bodies:
        answer = await client.post("/tokenize", json=body)
        try:
            if answer.status_code == 200 and (ids := decode(answer.content, type=TokenIds).tokens):
                return ids
        except ValueError:
            continue
    return []


async def send_completion(
    client: httpx.AsyncClient, model: str, request: BenchRequest, extra_body: Mapping[str, Any] | None = None
) -> Outcome:
    """Send a request for a greedy completion of exactly `request.max_tokens` tokens; return its outcome.

    `extra_body` has fields to add to the request's body; a value of None removes the field.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra_body or {}),
    }
    content = {key: value for key, value in body.items() if value is not None}
    outcome, nothing_arrived = await _send_once(client, content, request)
    if nothing_arrived:
        # Servers close connections that were kept open but idle (llama.cpp after a few seconds), sometimes just as
        # such a connection is used again. Clients then send the request once more, on a new one.
        outcome, _ = await _send_once(client, content, request)
    return outcome


async def _send_once(
    client: httpx.AsyncClient, content: Mapping[str, Any], request: BenchRequest
) -> tuple[Outcome, bool]:
    """Send a request; return its outcome, and whether the server closed the connection before any token."""
    reply, send_time, closed = Reply(), perf_counter(), False
    try:
        error = await _read_answer(client, content, reply)
    except (httpx.HTTPError, StreamError) as failure:
        error = _format_error(failure)
        closed = isinstance(failure, httpx.RemoteProtocolError) and not reply.arrival_times
    return Outcome(request.max_tokens, send_time, reply, error), closed


async def _read_answer(client: httpx.AsyncClient, content: Mapping[str, Any], reply: Reply) -> str | None:
    """Send a request and add its answer to `reply`; return an error message if its status is not 200.

    Raises httpx.HTTPError and StreamError.
    """
    async with client.stream("POST", "/v1/completions", json=content) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            return format_http_error(answer.status_code, text)
        async for line in iter_lines(answer.aiter_bytes()):
            reply.take(line)
        reply.check_end()
    return None


def _format_error(error: Exception) -> str:
    return str(error) or type(error).__name__
