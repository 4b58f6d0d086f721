"""The messages between API processes and replicas: those of the engine, and a few that are added to them.

All are sent as MessagePack, so that Ray pickles only bytes and the dict of a hint.
"""

from __future__ import annotations

import msgspec

from server.engine.ipc.messages import Answer, Cancel, Hello, Observed, QueryPayload, RequestEvent, Submit


class Routed(msgspec.Struct, tag=True, frozen=True):
    """First message of a stream: the replica that serves its requests, and why the router has chosen it."""

    replica: str
    reason: str = ""
    expected_cached_tokens: int = 0


class EngineGone(msgspec.Struct, tag=True, frozen=True):
    """Last message of a stream whose replica has no engine, or has lost it."""

    message: str
    retry_after: float = 0.0


class ReplicaInfo(msgspec.Struct, frozen=True):
    """A replica's description of itself: its id, and what its engine serves (None: there is no engine now)."""

    replica: str
    hello: Hello | None


class ReplicaAnswer(msgspec.Struct, frozen=True):
    """The answer of a replica's engine to a query."""

    replica: str
    answer: Answer


StreamItem = Routed | EngineGone | RequestEvent

_ENCODER = msgspec.msgpack.Encoder()
_ITEMS: msgspec.msgpack.Decoder[list[StreamItem]] = msgspec.msgpack.Decoder(list[StreamItem])
_SUBMITS: msgspec.msgpack.Decoder[list[Submit]] = msgspec.msgpack.Decoder(list[Submit])
_CANCEL: msgspec.msgpack.Decoder[Cancel] = msgspec.msgpack.Decoder(Cancel)
_OBSERVED: msgspec.msgpack.Decoder[Observed] = msgspec.msgpack.Decoder(Observed)
_PAYLOAD: msgspec.msgpack.Decoder[QueryPayload] = msgspec.msgpack.Decoder(QueryPayload)
_INFO: msgspec.msgpack.Decoder[ReplicaInfo] = msgspec.msgpack.Decoder(ReplicaInfo)
_ANSWER: msgspec.msgpack.Decoder[ReplicaAnswer] = msgspec.msgpack.Decoder(ReplicaAnswer)

encode = _ENCODER.encode
decode_items = _ITEMS.decode
decode_submits = _SUBMITS.decode
decode_cancel = _CANCEL.decode
decode_observed = _OBSERVED.decode
decode_payload = _PAYLOAD.decode
decode_info = _INFO.decode
decode_answer = _ANSWER.decode
