"""Messages between API workers and the engine as frames of msgpack.

A frame to the engine is one message; a frame from the engine is the list of one worker's events of one step.
Knows bytes, but no socket, and nothing of what the messages mean.
"""

from __future__ import annotations

import msgspec

from server.engine.ipc.messages import FromEngine, ToEngine
from server.processes.framing import FrameDecoder, WireError, encode_frame

__all__ = ["FrameDecoder", "WireError", "encode_message", "make_event_decoder", "make_message_decoder"]

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])


def encode_message(message: ToEngine | list[FromEngine]) -> bytes:
    """Return a message as a frame. Raises WireError when it is too long."""
    return encode_frame(_ENCODER.encode(message))


def make_message_decoder() -> FrameDecoder[ToEngine]:
    """Return a reader of frames with a worker's messages."""
    return FrameDecoder(_TO_ENGINE.decode)


def make_event_decoder() -> FrameDecoder[list[FromEngine]]:
    """Return a reader of frames with the engine's events, a list for each step."""
    return FrameDecoder(_FROM_ENGINE.decode)
