"""The framing of messages between processes of the server: 4 bytes of length, big-endian, then the message.

Knows bytes, but no socket, and nothing of what the messages mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_FRAME = 256 * 2**20  # bytes; a longer frame is a broken stream, not a message

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The bytes are not messages of this protocol; the connection cannot be used any more."""


def framed(body: bytes) -> bytes:
    """Return `body` with its length before it. Raises WireError when it is longer than MAX_FRAME."""
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[T]):
    """Splits the bytes of a socket, which come in pieces of any size, into messages."""

    def __init__(self, decode: Callable[[memoryview], T]) -> None:
        self._decode = decode
        self._kept = bytearray()  # the beginning of a frame
        self._wanted = 0  # bytes of that frame, or of its head until its length is known

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that are complete now. Raises WireError."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return
            data, self._kept = bytes(self._kept), bytearray()
        start = 0
        while (end := start + _length(data, start)) <= len(data):
            yield self._decoded(memoryview(data)[start + _LENGTH.size : end])
            start = end
        self._kept += memoryview(data)[start:]
        self._wanted = end - start

    def _decoded(self, body: memoryview) -> T:
        try:
            return self._decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a frame holds no message: {error}") from None


def _length(data: bytes, start: int) -> int:
    """Return the length of the frame that begins at `start`, or of its head where that is not there yet."""
    if len(data) - start < _LENGTH.size:
        return _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, start)
    if length > MAX_FRAME:
        raise WireError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
    return _LENGTH.size + int(length)
