"""Reads a streamed completion and notes when its tokens arrive. Knows the OpenAI protocol, and no HTTP client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any


class StreamError(Exception):
    """The stream does not hold a whole answer."""


@dataclass
class Reply:
    """When the pieces of an answer arrived, and what the server counted. A piece may hold several tokens."""

    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def gaps(self) -> list[float]:
        """Seconds from piece to piece."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


def read_reply(lines: Iterable[bytes], clock: Callable[[], float] = perf_counter) -> Reply:
    """The answer in a stream's lines. Raises StreamError for an error in the stream, or one that ends too soon."""
    reply = Reply()
    for line in lines:
        if not line.startswith(b"data:"):  # blank lines, and comments that keep the connection alive
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            break
        _take(reply, _parsed(data), clock)
    else:
        raise StreamError("the stream ended without [DONE]")
    reply.completion_tokens = reply.completion_tokens or len(reply.arrivals)
    return reply


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise StreamError(f"no JSON in the stream: {data[:100]!r}") from None
    if not isinstance(chunk, dict):
        raise StreamError(f"no object in the stream: {data[:100]!r}")
    return chunk


def _take(reply: Reply, chunk: dict[str, Any], clock: Callable[[], float]) -> None:
    if error := chunk.get("error"):
        raise StreamError(f"error in the stream: {error['message'] if isinstance(error, dict) else error}")
    if usage := chunk.get("usage"):
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.completion_tokens = usage["completion_tokens"]
    for choice in chunk.get("choices", ()):
        ends = choice.get("finish_reason") is not None
        if choice.get("text") or not ends:  # a last piece may tell only that it is the last
            reply.arrivals.append(clock())
