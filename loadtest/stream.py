"""A reader of streamed completions and chats that records when tokens arrive. Independent of the HTTP client."""

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


# ---------------------------------------------------------------- the fields of a chunk; servers may write null
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


CHUNK_DECODER = Decoder(Chunk)


# ---------------------------------------------------------------- an answer
class StreamError(Exception):
    """The stream does not contain a whole answer."""


@dataclass
class Reply:
    """An answer: when its pieces arrived, and the server's counts. A piece may contain several tokens."""

    arrival_times: list[float] = field(default_factory=list)
    end_time: float | None = None  # when the stream ended with [DONE]
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # not every server reports it
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def gaps(self) -> list[float]:
        """Return the seconds from piece to piece."""
        return [later - earlier for earlier, later in pairwise(self.arrival_times)]

    def compute_tokens_per_second(self) -> float | None:
        """Return the tokens a second after the first one; None if there was no second token."""
        seconds = self.arrival_times[-1] - self.arrival_times[0] if self.arrival_times else 0.0
        return (self.completion_tokens - 1) / seconds if seconds and self.completion_tokens > 1 else None

    def take(self, line: bytes, clock: Clock = perf_counter) -> None:
        """Process the stream's next line. Raises StreamError if it is not a part of an answer."""
        # other lines are blank, or comments that keep the connection alive
        if self.end_time is not None or not line.startswith(b"data:"):
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.end_time = clock()
            self.completion_tokens = self.completion_tokens or len(self.arrival_times)
        else:
            self._add_chunk(_decode_chunk(data), clock)

    def _add_chunk(self, chunk: Chunk, clock: Clock) -> None:
        if chunk.error:
            raise StreamError(f"error in the stream: {_get_error_message(chunk.error)}")
        if usage := chunk.usage:
            self.prompt_tokens = usage.prompt_tokens or 0
            self.completion_tokens = usage.completion_tokens or 0
            self.cached_tokens = (usage.prompt_tokens_details or Details()).cached_tokens
        for choice in chunk.choices or ():
            delta = choice.delta or Delta()
            text = choice.text or delta.content or delta.reasoning_content or ""
            if text or (choice.finish_reason is None and delta.role is None):  # the first and the last may be empty
                self.arrival_times.append(clock())
                self.pieces.append(text)

    def check_end(self) -> None:
        """Raise StreamError if the stream ended without [DONE]."""
        if self.end_time is None:
            raise StreamError("the stream ended without [DONE]")


def read_reply(lines: Iterable[bytes], clock: Clock = perf_counter, max_pieces: int | None = None) -> Reply:
    """Return the answer in a stream's lines, or its first `max_pieces` pieces.

    Raises StreamError if the stream has an error or ends early.
    """
    reply = Reply()
    for line in lines:
        reply.take(line, clock)
        if max_pieces is not None and len(reply.arrival_times) >= max_pieces:
            return reply
    reply.check_end()
    return reply


def format_http_error(status: int, answer: str) -> str:
    """Return why a request failed: "HTTP 404: message", the same text for the same cause."""
    try:
        return f"HTTP {status}: {_get_error_message(json.loads(answer)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


def _get_error_message(error: Any) -> Any:
    """Return the message of an error object like OpenAI's; of any other value the value itself."""
    return error["message"] if isinstance(error, dict) and "message" in error else error


def _decode_chunk(data: bytes) -> Chunk:
    try:
        return CHUNK_DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"a line of the stream is not a part of an answer: {data[:100]!r} ({error})") from None
