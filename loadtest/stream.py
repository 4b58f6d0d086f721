"""Reads a streamed completion or chat and notes when tokens arrive. Knows the OpenAI protocol, and no HTTP client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.json import Decoder

Clock = Callable[[], float]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # exact as a float, too


# ---------------------------------------------------------------- a chunk: what we read of it; servers may write null
class Details(Struct):
    cached_tokens: Count | None = None


class Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: Details | None = None


class Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


CHUNKS = Decoder(Chunk)


# ---------------------------------------------------------------- an answer
class StreamError(Exception):
    """The stream does not hold a whole answer."""


@dataclass
class Reply:
    """When the pieces of an answer arrived, and what the server counted. A piece may hold several tokens."""

    arrivals: list[float] = field(default_factory=list)
    end: float | None = None  # when the stream said that it was whole
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # not every server tells
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def gaps(self) -> list[float]:
        """Seconds from piece to piece."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    def speed(self) -> float | None:
        """Tokens a second, once the first was there; None where there was no second one."""
        seconds = self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0
        return (self.completion_tokens - 1) / seconds if seconds and self.completion_tokens > 1 else None

    def take(self, line: bytes, clock: Clock = perf_counter) -> None:
        """The stream's next line. Raises StreamError for what is no part of an answer."""
        if self.end is not None or not line.startswith(b"data:"):  # blank, or a comment that keeps the connection alive
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.end = clock()
            self.completion_tokens = self.completion_tokens or len(self.arrivals)
        else:
            self._take(_chunk(data), clock)

    def _take(self, chunk: Chunk, clock: Clock) -> None:
        if chunk.error:
            raise StreamError(f"error in the stream: {_message(chunk.error)}")
        if usage := chunk.usage:
            self.prompt_tokens = usage.prompt_tokens or 0
            self.completion_tokens = usage.completion_tokens or 0
            self.cached_tokens = (usage.prompt_tokens_details or Details()).cached_tokens
        for choice in chunk.choices or ():
            delta = choice.delta or Delta()
            text = choice.text or delta.content or delta.reasoning_content or ""
            if text or (choice.finish_reason is None and delta.role is None):  # the first and the last may be empty
                self.arrivals.append(clock())
                self.pieces.append(text)

    def check_end(self) -> None:
        """Raises StreamError when nothing said that the answer is whole."""
        if self.end is None:
            raise StreamError("the stream ended without [DONE]")


def read_reply(lines: Iterable[bytes], clock: Clock = perf_counter, most: int | None = None) -> Reply:
    """The answer in a stream's lines, to their end, or no more of it than `most` pieces.

    Raises StreamError for an error in the stream, or one that ends too soon.
    """
    reply = Reply()
    for line in lines:
        reply.take(line, clock)
        if most is not None and len(reply.arrivals) >= most:
            return reply
    reply.check_end()
    return reply


def refusal(status: int, answer: str) -> str:
    """Why a request failed, in a few words that are the same for all alike."""
    try:
        return f"HTTP {status}: {_message(json.loads(answer)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


def _message(error: Any) -> Any:
    """Of an error as OpenAI writes it, or in a plain string."""
    return error["message"] if isinstance(error, dict) and "message" in error else error


def _chunk(data: bytes) -> Chunk:
    try:
        return CHUNKS.decode(data)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"no part of an answer in the stream: {data[:100]!r} ({error})") from None
