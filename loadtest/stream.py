"""Reads streamed completions and chat completions and records when tokens arrive. Independent of the HTTP client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.json import Decoder

Clock = Callable[[], float]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # number of tokens, small enough to be exact as a float


# ---------------------------------------------------------------- the JSON fields of a streamed chunk; each may be null
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
    """The stream contains an error or something other than an answer, or ended before the answer did."""


@dataclass
class Reply:
    """An answer: its pieces of text with their arrival times, and the numbers of tokens that the server reports.

    A piece is the text of one chunk of the stream and may contain several tokens. Times are in seconds.
    """

    arrival_times: list[float] = field(default_factory=list)
    end_time: float | None = None  # time at which [DONE] ended the stream; None before that
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # number of prompt tokens found in the cache; None if not reported
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def gaps(self) -> list[float]:
        """Return the seconds between each two consecutive pieces of the answer."""
        return [later - earlier for earlier, later in pairwise(self.arrival_times)]

    def compute_tokens_per_second(self) -> float | None:
        """Return the tokens per second after the first token; None if there was no second token."""
        seconds = self.arrival_times[-1] - self.arrival_times[0] if self.arrival_times else 0.0
        return (self.completion_tokens - 1) / seconds if seconds and self.completion_tokens > 1 else None

    def take(self, line: bytes, clock: Clock = perf_counter) -> None:
        """Add the stream's next line to the answer. Raises StreamError if it is an error or not a part of an answer."""
        # ignore lines without data: they are blank, or comments that keep the connection alive
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
            # the first chunk (role) and the last one (finish_reason) do not count as pieces if they have no text
            if text or (choice.finish_reason is None and delta.role is None):
                self.arrival_times.append(clock())
                self.pieces.append(text)

    def check_end(self) -> None:
        """Raise StreamError if the stream ended without [DONE]."""
        if self.end_time is None:
            raise StreamError("the stream ended without [DONE]")


def read_reply(lines: Iterable[bytes], clock: Clock = perf_counter, max_pieces: int | None = None) -> Reply:
    """Return the answer in a stream's lines; stop reading after `max_pieces` pieces, if given.

    Raises StreamError if the stream has an error or ends before [DONE].
    """
    reply = Reply()
    for line in lines:
        reply.take(line, clock)
        if max_pieces is not None and len(reply.arrival_times) >= max_pieces:
            return reply
    reply.check_end()
    return reply


async def iter_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, split at line feeds only; httpx's aiter_lines also splits at U+2028 within JSON."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
    yield rest


def format_http_error(status: int, answer: str) -> str:
    """Return a message for a failed request, such as "HTTP 404: ..." with the error message of the server's answer."""
    try:
        return f"HTTP {status}: {_get_error_message(json.loads(answer)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"


def _get_error_message(error: Any) -> Any:
    """Return the message of an error object in OpenAI's format; any other value is returned as it is."""
    return error["message"] if isinstance(error, dict) and "message" in error else error


def _decode_chunk(data: bytes) -> Chunk:
    try:
        return CHUNK_DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"a line of the stream is not a part of an answer: {data[:100]!r} ({error})") from None
