"""A replica on Ray Serve: an engine in a process of its own, and the methods by which API processes use it.

API processes call its public methods through a deployment handle. The first argument of each is a hint for the router,
the second a message of messages.py as bytes, and each returns or yields such messages. Ray calls `record_...` and
`check_health`. Imports no torch: the engine does, in its process (engine_host.py).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any

import msgspec
from ray import serve

from config.settings import Settings
from server.cluster import messages
from server.cluster.autoscaling import STATISTICS
from server.cluster.messages import EngineGone, ReplicaAnswer, ReplicaInfo, Routed, StreamItem, encode
from server.cluster.router_metrics import RouterCounts
from server.cluster.scale import divide_machine
from server.cluster.serve.engine_host import EngineHost
from server.engine.ipc.client import EngineLost, Stream
from server.engine.ipc.messages import Admitted, Answer, Failed, Profile
from server.engine.ipc.socket_client import SocketClient
from server.logs import configure_logging, hide_exception_messages
from server.models.files.directory import resolve_model_settings

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0  # seconds until the client has to be connected to an engine that is ready
PROFILE_EXTRA_TIMEOUT = 120.0  # seconds to wait beyond the recording of a profile
# An item of a stream costs Ray's processes about a millisecond of CPU time, whatever is in it. So a stream's events are
# collected for this many seconds for each stream of the replica, up to a maximum, before the next item is sent.
COLLECT_SECONDS = 0.001
MAX_COLLECT_SECONDS = 0.05
NOT_READY = {"ready": False, "instances": {}, "queued_tokens": 0, "num_requests": 0, "kv_usage": 0.0}


class EngineReplica:
    """An actor of Ray with an engine."""

    async def __init__(self, settings: Settings, per_node: int, gpus: float) -> None:  # type: ignore[misc]  # awaited by Ray
        """Start an engine on a machine that is divided among `per_node` replicas; each has `gpus` GPUs."""
        self._id: str = serve.get_replica_context().replica_id.unique_id
        multiprocessing.current_process().name = f"replica {self._id}"  # in the log
        configure_logging(settings)
        if not settings.log_prompts:
            hide_exception_messages()
        self._streams: dict[str, Stream] = {}  # by request id
        self._counts = RouterCounts()
        self._num_reports = 0
        settings = divide_machine(await asyncio.to_thread(resolve_model_settings, settings), per_node, gpus)
        self._host = EngineHost(settings)
        self._client = SocketClient(await asyncio.to_thread(self._host.wait_until_ready))
        await self._client.start()
        async with asyncio.timeout(CONNECT_TIMEOUT):
            while self._client.hello is None:
                await asyncio.sleep(0.01)

    # ------------------------------------------------------------ requests
    async def generate(self, hint: dict[str, Any], payload: bytes) -> AsyncGenerator[bytes, None]:
        """Run requests, and yield their events in batches; closing the generator cancels requests that have not ended.

        The first event is Routed. The last one is EngineGone if there is no engine any more.
        """
        submits = messages.decode_submits(payload)
        routed = hint.get("routed") or {}
        first = Routed(self._id, str(routed.get("reason", "")), int(routed.get("expected_cached_tokens", 0)))
        batch: list[StreamItem] = [first]
        try:
            async with self._client.stream(submits) as stream:
                self._streams |= {submit.request_id: stream for submit in submits}
                try:
                    due = 0.0  # time.monotonic() until which events are collected
                    async for event in stream:
                        if isinstance(event, Admitted) and event.request_id == submits[0].request_id:
                            self._counts.record(first, event.cached_tokens)
                        batch.append(event)
                        if (wait := due - monotonic()) > 0:
                            await asyncio.sleep(wait)
                        while (following := stream.get_nowait()) is not None:
                            batch.append(following)
                        sent, batch = batch, []
                        due = monotonic() + min(MAX_COLLECT_SECONDS, COLLECT_SECONDS * len(self._streams))
                        yield encode(sent)
                finally:
                    for submit in submits:
                        self._streams.pop(submit.request_id, None)
        except EngineLost as error:
            yield encode([*batch, EngineGone(str(error), error.retry_after)])

    async def cancel(self, hint: dict[str, Any], payload: bytes) -> bytes:
        """End a request; an Explained and Compared events may follow after "stop"."""
        message = messages.decode_cancel(payload)
        if (stream := self._streams.get(message.request_id)) is not None:
            stream.cancel(message.request_id, message.outcome)
        return b""

    # ------------------------------------------------------------ queries
    async def query(self, hint: dict[str, Any], payload: bytes) -> bytes:
        """Return the engine's answer to a question or a command."""
        what = messages.decode_payload(payload)
        try:
            timeout = what.seconds + PROFILE_EXTRA_TIMEOUT if isinstance(what, Profile) else None
            answer = await self._client.send_query(what, timeout)
        except EngineLost as error:
            answer = Answer(0, b"", Failed("", 503, str(error), "engine_unavailable", None, error.retry_after))
        if what == "metrics" and answer.error is None:
            answer = msgspec.structs.replace(answer, body=self._counts.append_to(answer.body))
        return encode(ReplicaAnswer(self._id, answer))

    async def describe(self, hint: dict[str, Any], payload: bytes) -> bytes:
        """Return what the engine serves."""
        return encode(ReplicaInfo(self._id, self._client.hello))

    async def observe(self, hint: dict[str, Any], payload: bytes) -> bytes:
        """Add an API process's counts of responses to the metrics; without an engine they are lost."""
        try:
            self._client.send_observed(messages.decode_observed(payload))
        except EngineLost:
            log.info("counts of responses are lost, as there is no engine")
        return b""

    # ------------------------------------------------------------ called by Ray
    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the statistics from which routers choose between replicas (server/engine/live/routing.py)."""
        try:
            answer = await self._client.send_query("routing")
        except EngineLost:
            return NOT_READY
        if answer.error is not None:
            return NOT_READY
        statistics: dict[str, Any] = msgspec.msgpack.decode(answer.body)
        self._num_reports += 1  # so that routers tell a replica that has nothing new from one that does not answer
        return statistics | {"report": self._num_reports}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics from which Ray chooses the number of replicas (server/cluster/autoscaling.py)."""
        statistics = await self.record_routing_stats()
        return {name: float(statistics[name]) for name in STATISTICS}

    async def check_health(self) -> None:
        """Raise RuntimeError if the process that keeps the engine running has ended: Ray then replaces the replica."""
        if not self._host.is_running:
            raise RuntimeError("the process that keeps the engine running has ended")

    async def __del__(self) -> None:  # called by Ray once the replica has drained, and after a start that failed
        if hasattr(self, "_client"):
            await self._client.close()
        if hasattr(self, "_host"):
            await asyncio.to_thread(self._host.stop)
