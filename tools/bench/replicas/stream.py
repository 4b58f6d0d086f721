"""Streams chat completions, and notes when their events arrive and what the server says of their prompts."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from tools.server_process import RunError

TIMEOUT = 120.0  # seconds that a request may take


@dataclass(frozen=True)
class Answer:
    """A streamed answer, with what the server said of its prompt."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int | None  # cached tokens that the router expected; None: there is no router
    output_tokens: int
    replica: str
    first_token: float  # seconds from sending the request
    gaps: Sequence[float]  # seconds between events of the stream
    turn: tuple[int, int] = (0, 0)  # number of the chat, and of the turn in it

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Stream a chat completion, and return it. Raises RunError for an error."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "explain": True, "temperature": 0}
    sent, times, text, last = time.perf_counter(), list[float](), "", dict[str, Any]()
    usage: dict[str, Any] = {}
    async with client.stream("POST", path, json=body) as response:
        async for event in _iter_events(response):
            if "error" in event:
                raise RunError(f"a request failed: {event['error']}")
            usage = event.get("usage") or usage
            if not event["choices"]:
                continue
            choice = event["choices"][0]
            if content := choice["delta"].get("content"):
                text += content
                times.append(time.perf_counter())
            last = choice.get("kv_cache") or last
    routed = last.get("routed") or {}
    return Answer(
        text,
        usage["prompt_tokens"],
        last["cached_tokens"],
        routed.get("expected_cached_tokens"),
        usage["completion_tokens"],
        routed.get("replica", ""),
        times[0] - sent if times else time.perf_counter() - sent,
        [after - before for before, after in pairwise(times)],
    )


async def _iter_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    if response.status_code != 200:
        raise RunError(f"a request was answered {response.status_code}: {(await response.aread()).decode()[:300]}")
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def ask_once(url: str, body: Mapping[str, Any]) -> Answer:
    """Stream a chat completion over a connection of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        return await ask(client, "/v1/chat/completions", body)
