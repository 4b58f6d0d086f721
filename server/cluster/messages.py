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

encode = msgspec.msgpack.Encoder().encode
decode_items = msgspec.msgpack.Decoder(list[StreamItem]).decode
decode_submits = msgspec.msgpack.Decoder(list[Submit]).decode
decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
decode_observed = msgspec.msgpack.Decoder(Observed).decode
_PAYLOAD: msgspec.msgpack.Decoder[QueryPayload] = msgspec.msgpack.Decoder(QueryPayload)
decode_payload = _PAYLOAD.decode
decode_info = msgspec.msgpack.Decoder(ReplicaInfo).decode
decode_answer = msgspec.msgpack.Decoder(ReplicaAnswer).decode
