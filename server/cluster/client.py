"""The engines of several replicas as one `EngineClient`: a router sends each prompt to one of them (calls.py).

Queries go to all replicas, and their answers are merged (merging.py). Those that only one replica can answer go to the
first. `get_replica` returns a client of one replica alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from server.cluster.calls import ReplicaCalls, ReplicaCallsClient, ReplicaLost
from server.cluster.hints import HintMaker
from server.cluster.merging import asks_one_replica, merge_answers, merge_hellos, split_pin_id
from server.cluster.messages import ReplicaAnswer, ReplicaInfo, decode_info
from server.engine.ipc.client import changes_answers
from server.engine.ipc.messages import Answer, Failed, Hello, QueryPayload, Unpin

log = logging.getLogger(__name__)

WATCH_INTERVAL = 1.0  # seconds after which all replicas describe themselves again
START_TIMEOUT = 30.0  # seconds for which an API process that starts waits for a replica before it takes requests
SLOW_AFTER = 4.0  # seconds after which an answer of several replicas leaves one out
COMMAND_TIMEOUT = 8.0  # likewise for commands, which should reach every replica


class ClusterClient(ReplicaCallsClient):
    """A client of all replicas."""

    def __init__(self, calls: ReplicaCalls, hints: HintMaker) -> None:
        super().__init__(calls, hints)
        self.replicas: Mapping[str, Hello | None] = {}  # by id; None: the replica has no engine now
        self._clients: dict[str, ReplicaClient] = {}  # of single replicas, by id
        self._watch_task: asyncio.Task[None] | None = None
        self._found_one = asyncio.Event()  # set once a replica has been ready

    def get_replica(self, replica: str) -> ReplicaClient | None:
        """Return the client of one replica alone; None if there is no such replica."""
        return self._clients.get(replica)

    async def _query(self, what: QueryPayload) -> Answer:
        if isinstance(what, Unpin):
            return await self._unpin(what)
        if asks_one_replica(what):
            return (await self._query_replica(self.choose_one(), what)).answer
        if changes_answers(what):
            return merge_answers(what, await self._command_all(what))
        ready = [id for id, hello in self.replicas.items() if hello is not None]
        return merge_answers(what, await self._query_all(ready, what, SLOW_AFTER))

    async def _command_all(self, what: QueryPayload) -> list[ReplicaAnswer]:
        """Return the answers of all replicas to a command, also of those that have joined meanwhile."""
        answers: list[ReplicaAnswer] = []
        started_at = monotonic()
        while new := sorted(self.replicas.keys() - {each.replica for each in answers}):
            answers += await self._query_all(new, what, COMMAND_TIMEOUT)
            if monotonic() > started_at + SLOW_AFTER:
                break  # looking for others would take longer than a client waits
            await self._look()
        return answers

    async def _query_all(self, replicas: Sequence[str], what: QueryPayload, timeout: float) -> list[ReplicaAnswer]:
        """Return the answers of replicas, and an error for each that does not answer in time."""
        return await asyncio.gather(*(self._query_in_time(each, what, timeout) for each in replicas))

    async def _query_in_time(self, replica: str, what: QueryPayload, timeout: float) -> ReplicaAnswer:
        """Return a replica's answer; it is an error if the replica has gone, or takes longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._query_replica(replica, what)
        except (TimeoutError, ReplicaLost):
            log.warning("replica %s did not answer", replica)
            failed = Failed("", 503, f"replica {replica} did not answer; try again", "engine_unavailable")
            return ReplicaAnswer(replica, Answer(0, b"", failed))

    async def _unpin(self, command: Unpin) -> Answer:
        """Remove a pin from each replica that its id names."""
        ids = split_pin_id(command.pin_id)
        known = [(replica, pin_id) for replica, pin_id in ids if replica in self.replicas]
        if not known:
            message = f"there is no pin {command.pin_id!r}: it may have expired, or its replicas have ended"
            return Answer(0, b"", Failed("", 404, message, "not_found"))
        answers = await asyncio.gather(
            *(
                self._query_in_time(replica, msgspec.structs.replace(command, pin_id=pin_id), COMMAND_TIMEOUT)
                for replica, pin_id in known
            )
        )
        return merge_answers(command, answers)

    def _invalidate_answers(self) -> None:
        self.epoch = object()
        for each in self._clients.values():
            each.epoch = self.epoch

    def choose_one(self) -> str:
        return min(id for id, hello in self.replicas.items() if hello is not None)

    # ------------------------------------------------------------ which replicas there are
    async def start(self) -> None:
        """Begin to watch the replicas; return once one is ready, or START_TIMEOUT has passed.

        So requests that come while API processes are replaced find replicas.
        """
        self._watch_task = asyncio.create_task(self._watch(), name="replicas")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT):
                await self._found_one.wait()

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for each in self._clients.values():
            await each.close()
        await super().close()

    async def _watch(self) -> None:
        """Ask all replicas what they serve, for ever."""
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the replicas could not be asked what they serve")
            await asyncio.sleep(WATCH_INTERVAL)

    async def _look(self) -> None:
        """Ask all replicas what they serve."""
        try:
            infos = [decode_info(each) for each in await self._calls.broadcast("describe", b"", SLOW_AFTER)]
        except ReplicaLost:
            infos = []
        except TimeoutError:  # at least one is slow, and keeps the answers of the others back
            ids = await self._calls.list_replicas(SLOW_AFTER)
            found = await asyncio.gather(*map(self._describe_in_time, ids))
            if ids and all(isinstance(each, TimeoutError) for each in found):
                return log.warning("no replica has answered in time; this machine may be busy")
            infos = [each for each in found if isinstance(each, ReplicaInfo)]
            silent = [id for id, each in zip(ids, found, strict=True) if isinstance(each, TimeoutError)]
            infos += [ReplicaInfo(id, None) for id in silent]
        self._update(infos)

    async def _describe_in_time(self, replica: str) -> ReplicaInfo | TimeoutError | ReplicaLost:
        """Return what a replica serves, or why it has not said so."""
        try:
            async with asyncio.timeout(SLOW_AFTER):
                return decode_info(await self._calls.call("describe", replica, b""))
        except (TimeoutError, ReplicaLost) as error:
            return error

    def _update(self, infos: Sequence[ReplicaInfo]) -> None:
        replicas = {each.replica: each.hello for each in sorted(infos, key=lambda each: each.replica)}
        if replicas == self.replicas:
            return
        log.info("%d replicas, %d of them ready", len(replicas), sum(each is not None for each in replicas.values()))
        self.replicas = replicas
        self.hello = merge_hellos([each for each in replicas.values() if each is not None])
        if self.hello is not None:
            self._found_one.set()
        self._clients = {id: self._clients.get(id) or ReplicaClient(self, id) for id in replicas}
        for id, each in self._clients.items():
            each.hello = replicas[id]
        self._invalidate_answers()


class ReplicaClient(ReplicaCallsClient):
    """A client of one of the replicas that a ClusterClient watches."""

    def __init__(self, cluster: ClusterClient, replica: str) -> None:
        super().__init__(cluster._calls, cluster._hints)
        self._cluster = cluster
        self._replica = replica

    def _get_hint_fields(self) -> dict[str, Any]:
        return {"replica": self._replica}

    async def _query(self, what: QueryPayload) -> Answer:
        return (await self._query_replica(self._replica, what)).answer

    def _invalidate_answers(self) -> None:
        self._cluster._invalidate_answers()

    def choose_one(self) -> str:
        return self._replica
