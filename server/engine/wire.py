"""The framing between API workers and the engine: 4 bytes of length, big-endian, then msgpack.

A frame to the engine is one message; a frame from the engine is the list of one worker's events of one step.
Knows nothing of sockets beyond asyncio's streams, and nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from server.engine.messages import FromEngine, ToEngine

T = TypeVar("T")

MAX_FRAME = 256 * 2**20  # bytes; a longer frame is a broken stream, not a message
READ_AHEAD = 2**20  # bytes an asyncio stream buffers before it pauses the sender

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])


class WireError(Exception):
    """The bytes are no messages of this protocol; the connection is of no more use."""


def frame(message: ToEngine | list[FromEngine]) -> bytes:
    """The bytes that carry `message`. Raises WireError when it is longer than MAX_FRAME."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


async def to_engine(reader: asyncio.StreamReader) -> AsyncIterator[ToEngine]:
    """A worker's messages until it hangs up. Raises WireError, OSError."""
    async for body in _bodies(reader):
        yield _decoded(_TO_ENGINE, body)


async def from_engine(reader: asyncio.StreamReader) -> AsyncIterator[list[FromEngine]]:
    """The engine's events, a list for each step, until it hangs up. Raises WireError, OSError."""
    async for body in _bodies(reader):
        yield _decoded(_FROM_ENGINE, body)


async def _bodies(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        try:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
            yield await reader.readexactly(length)
        except asyncio.IncompleteReadError:  # hung up; half a message is no message
            return


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame holds no message: {error}") from None
