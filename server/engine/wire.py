"""The framing between API workers and the engine: 4 bytes of length, big-endian, then msgpack.

A frame to the engine is one message; a frame from the engine is the list of one worker's events of one step.
Knows bytes, but no socket, and nothing of what the messages mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from server.engine.messages import FromEngine, ToEngine

T = TypeVar("T")

MAX_FRAME = 256 * 2**20  # bytes; a longer frame is a broken stream, not a message

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


class Frames(Generic[T]):
    """Cuts what a socket gives, in whatever pieces, into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._kept = bytearray()  # the beginning of a frame
        self._wanted = 0  # bytes of it, as far as that is known

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that are complete now. Raises WireError."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return
            data, self._kept = bytes(self._kept), bytearray()
        start = 0
        while (end := start + _length(data, start)) <= len(data):
            yield _decoded(self._decoder, memoryview(data)[start + _LENGTH.size : end])
            start = end
        self._kept += memoryview(data)[start:]
        self._wanted = end - start


def to_engine() -> Frames[ToEngine]:
    """For a worker's messages."""
    return Frames(_TO_ENGINE)


def from_engine() -> Frames[list[FromEngine]]:
    """For the engine's events, a list for each step."""
    return Frames(_FROM_ENGINE)


def _length(data: bytes, start: int) -> int:
    """Of the frame that begins at `start`, all in all; as much of it as tells, if that is not there."""
    if len(data) - start < _LENGTH.size:
        return _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, start)
    if length > MAX_FRAME:
        raise WireError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
    return _LENGTH.size + int(length)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: memoryview) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame holds no message: {error}") from None
