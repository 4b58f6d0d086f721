"""The framing of messages between processes of the server: 4 bytes of length, big-endian, then the message.

Works on bytes alone: it reads from no socket and does not know what the messages mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME_BYTES = 256 * 2**20  # maximum of a message; a longer one means that the stream is broken

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """A message is too long, or bytes received are not messages of this protocol and the connection must be closed."""


def encode_frame(body: bytes) -> bytes:
    """Return `body` preceded by its length. Raises WireError if it is longer than MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is longer than the maximum, {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """A decoder that splits a stream of bytes, fed in pieces of any size, into messages."""

    def __init__(self, decode: Callable[[memoryview], T]) -> None:
        self._decode = decode
        self._buffer = bytearray()  # the bytes received so far of an incomplete frame
        # Size in bytes of the incomplete frame once it is complete; until its head (its length) is there, the head's.
        self._frame_size = 0

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that `data` completes. Raises WireError if a frame is too long or cannot be decoded."""
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
            raise WireError(f"a frame holds no message of this protocol: {error}") from None


def _read_length(data: bytes, start: int) -> int:
    """Return the size in bytes of the frame at `start`, with its head; the head's size while the head is incomplete."""
    if len(data) - start < _LENGTH.size:
        return _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, start)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is longer than the maximum, {MAX_FRAME_BYTES}")
    return _LENGTH.size + int(length)
