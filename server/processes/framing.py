"""The framing of messages between processes of the server: 4 bytes of length, big-endian, then the message.

Knows bytes, but no socket, and nothing of what the messages mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 256 * 2**20  # bytes; a longer frame is a broken stream, not a message

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The bytes are not messages of this protocol; the connection cannot be used any more."""


def encode_frame(body: bytes) -> bytes:
    """Return `body` with its length before it. Raises WireError when it is longer than MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """Splits the bytes of a socket, which come in pieces of any size, into messages."""

    def __init__(self, decode: Callable[[memoryview], T]) -> None:
        self._decode = decode
        self._buffer = bytearray()  # the beginning of a frame
        self._frame_size = 0  # bytes of that frame, or of its head until its length is known

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that are complete now. Raises WireError."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._frame_size:
                return
            data, self._buffer = bytes(self._buffer), bytearray()
        start = 0
        while (end := start + _read_length(data, start)) <= len(data):
            yield self._decode_body(memoryview(data)[start + _LENGTH.size : end])
            start = end
        self._buffer += memoryview(data)[start:]
        self._frame_size = end - start

    def _decode_body(self, body: memoryview) -> T:
        try:
            return self._decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a frame holds no message: {error}") from None


def _read_length(data: bytes, start: int) -> int:
    """Return the length of the frame that begins at `start`, or of its head where that is not there yet."""
    if len(data) - start < _LENGTH.size:
        return _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, start)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.size + int(length)
