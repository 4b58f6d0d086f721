"""The engines of several replicas as one `EngineClient`: a router sends each prompt to one of them.

Queries go to all replicas, and their answers are merged (merging.py); what only one replica can answer goes to the
first. `get_replica` returns a client of one replica alone. Knows the messages; how replicas are called is behind
`ReplicaCalls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from server.cluster.hints import HintMaker, RequestHint
from server.cluster.merging import asks_one_replica, merge_answers, merge_hellos, split_pin_id
from server.cluster.messages import (
    EngineGone,
    ReplicaAnswer,
    ReplicaInfo,
    Routed,
    decode_answer,
    decode_info,
    decode_items,
    encode,
)
from server.engine.ipc.client import EngineClient, EngineLost, Stream, changes_answers
from server.engine.ipc.messages import (
    Answer,
    Cancel,
    Command,
    Explained,
    Failed,
    Hello,
    Observed,
    Profile,
    Question,
    Submit,
    Tokens,
    Unpin,
)
from server.records import Routing

log = logging.getLogger(__name__)

WATCH_INTERVAL = 1.0  # seconds between two looks at which replicas there are
RETRY_AFTER = 5.0  # seconds after which a client may try again when there is no replica: one takes that long to start
SLOW_AFTER = 4.0  # seconds after which an answer of several replicas leaves one out
MAX_ATTEMPTS = 3  # most replicas that a request is sent to, one after the other, while nothing of it has arrived
LOST_MESSAGE = "the replica went away while it worked on this request; try again"


class ReplicaLost(Exception):
    """A replica, or its engine, ended before it had answered."""

    def __init__(self, message: str, replica: str | None = None, retry_after: float = RETRY_AFTER) -> None:
        super().__init__(message)
        self.replica = replica
        self.retry_after = retry_after


class ReplicaCalls(Protocol):
    """Calls methods of replicas; all raise ReplicaLost if a replica ends before it has answered."""

    def generate(self, hint: dict[str, Any], payload: bytes) -> AsyncGenerator[bytes, None]:
        """Run requests on the replica that the router chooses by the hint; closing the iterator cancels them."""
        ...

    async def call(self, method: str, replica: str, payload: bytes) -> bytes:
        """Call a method of one replica."""
        ...

    async def broadcast(self, method: str, payload: bytes) -> Sequence[bytes]:
        """Call a method of all replicas; return the results of those that have answered."""
        ...


class _Call:
    """The requests of one prompt, which are on one replica."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.submits = submits
        self.running = {submit.request_id for submit in submits}  # those that were not cancelled
        self.complete = set[str]()  # those whose last tokens have arrived
        self.replica: str | None = None  # None: nothing has arrived yet
        self.has_begun = False  # whether events have arrived, so that it cannot begin again elsewhere
        self.early_cancels: list[Cancel] = []  # for the replica, once it is known
        self.task: asyncio.Task[None] | None = None


class ReplicaCallsClient(EngineClient):
    """The part of a client that runs requests by calls of replicas; subclasses know which replicas there are."""

    def __init__(self, calls: ReplicaCalls, hints: HintMaker) -> None:
        super().__init__(lambda: RETRY_AFTER)
        self._calls = calls
        self._hints = hints
        self._by_request: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # kept here, as the event loop does not
        self._responses: Counter[int] = Counter()  # counts that no replica has got yet

    # ------------------------------------------------------------ requests
    def _submit(self, stream: Stream, submits: Sequence[Submit]) -> None:
        hello = self.get_hello()
        for group in group_by_prompt(submits):
            call = _Call(group)
            self._by_request |= dict.fromkeys(call.running, call)
            call.task = self._spawn(self._run_call(call, stream, hello))

    async def _run_call(self, call: _Call, stream: Stream, hello: Hello) -> None:
        """Put the events of a call into its stream; until the first has arrived, try other replicas after a loss."""
        avoid: list[str] = []
        try:
            while True:
                hint = self._hints.make(call.submits[0], hello, avoid=avoid)
                hint.fields |= self._get_hint_fields()
                try:
                    return await self._receive(call, stream, hint)
                except ReplicaLost as error:
                    replica = error.replica or dict(hint.fields.get("routed") or {}).get("replica")
                    if call.has_begun or replica is None or len(avoid) + 1 >= MAX_ATTEMPTS:
                        return stream.put(EngineLost(str(error), error.retry_after))
                    log.info("replica %s did not take a request (%s); trying another", replica, error)
                    avoid.append(replica)
        except Exception as error:
            log.exception("a call of a replica failed")
            for submit in call.submits:
                failed = Failed(submit.request_id, 500, f"the request failed between the server's processes: {error}")
                stream.put(failed)
        finally:
            for submit in call.submits:
                self._by_request.pop(submit.request_id, None)

    def _get_hint_fields(self) -> dict[str, Any]:
        """Return what all hints of this client have."""
        return {}

    async def _receive(self, call: _Call, stream: Stream, hint: RequestHint) -> None:
        routing: Routing | None = None
        # aclosing: a cancelled task has to cancel the call at once, not when the iterator is collected
        async with contextlib.aclosing(self._calls.generate(hint.fields, encode(call.submits))) as items:
            async for item in items:
                for event in decode_items(item):
                    match event:
                        case Routed():
                            routing = Routing(event.replica, event.reason, event.expected_cached_tokens)
                            self._start_call(call, event.replica)
                        case EngineGone():
                            raise ReplicaLost(event.message, call.replica, event.retry_after)
                        case Explained():
                            record = msgspec.structs.replace(event.record, routing=routing)
                            stream.put(Explained(event.request_id, record))
                        case _:
                            call.has_begun = True
                            if isinstance(event, Tokens):
                                self._note_tokens(call, hint, event)
                            stream.put(event)

    def _note_tokens(self, call: _Call, hint: RequestHint, event: Tokens) -> None:
        if event.request_id == call.submits[0].request_id:
            hint.add_output(event.tokens)
        if event.finish_reason is not None:
            call.complete.add(event.request_id)

    def _start_call(self, call: _Call, replica: str) -> None:
        call.replica = replica
        for message in call.early_cancels:
            self._spawn(self._send_cancel(replica, message))

    def _cancel(self, message: Cancel) -> None:
        call = self._by_request.get(message.request_id)
        if call is None:
            return
        call.running.discard(message.request_id)
        if message.request_id in call.complete and message.outcome == "stop":
            return  # the engine has ended it already
        if message.outcome == "cancelled" and not call.running:
            assert call.task is not None
            call.task.cancel()  # the replica notices that its stream is closed
        elif call.replica is None:
            call.early_cancels.append(message)
        else:
            self._spawn(self._send_cancel(call.replica, message))

    async def _send_cancel(self, replica: str, message: Cancel) -> None:
        with contextlib.suppress(ReplicaLost):
            await self._calls.call("cancel", replica, encode(message))

    # ------------------------------------------------------------ queries
    async def send_query(self, what: Question | Command | Profile, timeout: float | None = None) -> Answer:
        self.get_hello()
        timeout = self.query_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):
                return await self._query(what)
        except TimeoutError:
            raise self._make_lost_error(f"no answer came within {timeout:g} s; try again") from None
        except ReplicaLost as error:
            raise self._make_lost_error(str(error)) from None
        finally:
            if changes_answers(what):
                self._invalidate_answers()

    @abstractmethod
    async def _query(self, what: Question | Command | Profile) -> Answer:
        """Return the answer to a query. Raises ReplicaLost."""

    @abstractmethod
    def _invalidate_answers(self) -> None:
        """Note that answers kept from before are out of date."""

    async def _query_replica(self, replica: str, what: Question | Command | Profile) -> ReplicaAnswer:
        return decode_answer(await self._calls.call("query", replica, encode(what)))

    @abstractmethod
    def _choose_one(self) -> str:
        """Return the replica that answers what only one can answer; there is one if there is a Hello."""

    def send_observed(self, observed: Observed) -> None:
        """Send counts to one replica's metrics; those that do not arrive are sent with the next."""
        self.get_hello()
        self._responses.update(observed.responses)
        counts, self._responses = dict(self._responses), Counter()
        self._spawn(self._send_counts(self._choose_one(), Observed(counts, observed.memory_bytes)))

    async def _send_counts(self, replica: str, observed: Observed) -> None:
        try:
            await self._calls.call("observe", replica, encode(observed))
        except ReplicaLost:
            self._responses.update(observed.responses)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ClusterClient(ReplicaCallsClient):
    """A client of all replicas."""

    def __init__(self, calls: ReplicaCalls, hints: HintMaker) -> None:
        super().__init__(calls, hints)
        self.replicas: Mapping[str, Hello | None] = {}  # by id; None: the replica has no engine now
        self._clients: dict[str, ReplicaClient] = {}  # of single replicas, by id
        self._watch_task: asyncio.Task[None] | None = None

    def get_replica(self, replica: str) -> ReplicaClient | None:
        """Return the client of one replica alone, as long as there is that replica."""
        return self._clients.get(replica)

    async def _query(self, what: Question | Command | Profile) -> Answer:
        if isinstance(what, Unpin):
            return await self._unpin(what)
        if asks_one_replica(what):
            return (await self._query_replica(self._choose_one(), what)).answer
        if changes_answers(what):  # replicas that have just joined get it, too
            answers = [decode_answer(each) for each in await self._calls.broadcast("query", encode(what))]
        else:  # one that does not answer does not keep the others from it
            ready = [id for id, hello in self.replicas.items() if hello is not None]
            answers = await asyncio.gather(*(self._query_in_time(replica, what) for replica in ready))
        return merge_answers(what, answers)

    async def _query_in_time(self, replica: str, what: Question | Command | Profile) -> ReplicaAnswer:
        """Return a replica's answer: an error if it is gone, or takes longer than SLOW_AFTER."""
        try:
            async with asyncio.timeout(SLOW_AFTER):
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
        answers = [
            await self._query_replica(replica, msgspec.structs.replace(command, pin_id=pin_id))
            for replica, pin_id in known
        ]
        return merge_answers(command, answers)

    def _invalidate_answers(self) -> None:
        self.epoch = object()
        for each in self._clients.values():
            each.epoch = self.epoch

    def _choose_one(self) -> str:
        return min(id for id, hello in self.replicas.items() if hello is not None)

    # ------------------------------------------------------------ which replicas there are
    async def start(self) -> None:
        self._watch_task = asyncio.create_task(self._watch(), name="replicas")

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
                self._update([decode_info(each) for each in await self._calls.broadcast("describe", b"")])
            except ReplicaLost:
                self._update([])
            except Exception:
                log.exception("the replicas could not be asked what they serve")
            await asyncio.sleep(WATCH_INTERVAL)

    def _update(self, infos: Sequence[ReplicaInfo]) -> None:
        replicas = {each.replica: each.hello for each in sorted(infos, key=lambda each: each.replica)}
        if replicas == self.replicas:
            return
        log.info("%d replicas, %d of them ready", len(replicas), sum(each is not None for each in replicas.values()))
        self.replicas = replicas
        self.hello = merge_hellos([each for each in replicas.values() if each is not None])
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

    async def _query(self, what: Question | Command | Profile) -> Answer:
        return (await self._query_replica(self._replica, what)).answer

    def _invalidate_answers(self) -> None:
        self._cluster._invalidate_answers()

    def _choose_one(self) -> str:
        return self._replica


def group_by_prompt(submits: Sequence[Submit]) -> list[list[Submit]]:
    """Return the requests in groups, each with the choices (n > 1) of one prompt, which share their computation."""
    groups: dict[str, list[Submit]] = {}
    for submit in submits:
        groups.setdefault(submit.sibling_of or submit.request_id, []).append(submit)
    return list(groups.values())
