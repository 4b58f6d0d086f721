"""Runs the requests of an API process by calls of replicas: tries them again elsewhere, and cancels them.

Knows the messages. `ReplicaCalls` hides how replicas are called; subclasses of `ReplicaCallsClient` (client.py) know
which replicas there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from server.cluster.hints import HintMaker, RequestHint
from server.cluster.messages import EngineGone, ReplicaAnswer, Routed, decode_answer, decode_items, encode
from server.engine.ipc.client import EngineClient, EngineLost, Stream, changes_answers
from server.engine.ipc.messages import (
    Answer,
    Cancel,
    Explained,
    Failed,
    Hello,
    Observed,
    QueryPayload,
    RequestEvent,
    Submit,
    Tokens,
)
from server.engine.ipc.observations import ObservedCounts
from server.records import Routing

log = logging.getLogger(__name__)

RETRY_AFTER = 5.0  # seconds after which a client may try again when there is no replica: one takes that long to start
MAX_ATTEMPTS = 3  # greatest number of replicas that a request is sent to, while nothing of its answer has arrived
LOST_MESSAGE = "the replica went away while it worked on this request; try again"


class ReplicaLost(Exception):
    """A replica or its engine ended before it had answered, or there is none."""

    def __init__(self, message: str, replica: str | None = None, retry_after: float = RETRY_AFTER) -> None:
        super().__init__(message)
        self.replica = replica
        self.retry_after = retry_after


class ReplicaCalls(Protocol):
    """Calls methods of replicas. All methods raise ReplicaLost if a replica ends before it has answered."""

    def generate(self, hint: dict[str, Any], payload: bytes) -> AsyncGenerator[bytes, None]:
        """Run requests on the replica that the router chooses by the hint; closing the iterator cancels them."""
        ...

    async def call(self, method: str, replica: str, payload: bytes) -> bytes:
        """Call a method of one replica."""
        ...

    async def broadcast(self, method: str, payload: bytes, timeout: float) -> Sequence[bytes]:
        """Call a method of all replicas, those included that have just joined; return the results without errors.

        Raises TimeoutError if one of them does not answer in time.
        """
        ...

    async def list_replicas(self, timeout: float) -> Sequence[str]:
        """Return the ids of all replicas, without calling any of them. Raises TimeoutError."""
        ...


class _Call:
    """The choices of one prompt, which run on one replica."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.submits = submits
        self.running = {submit.request_id for submit in submits}  # those that were not cancelled
        self.complete = set[str]()  # those whose last tokens, or whose failure, have arrived
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
        self._tasks: set[asyncio.Task[Any]] = set()  # kept here, as the event loop has weak references only
        self._counts = ObservedCounts()  # those that no replica has got yet

    # ------------------------------------------------------------ requests
    def _submit(self, stream: Stream, submits: Sequence[Submit]) -> None:
        hello = self.get_hello()
        for group in group_by_prompt(submits):
            call = _Call(group)
            self._by_request |= dict.fromkeys(call.running, call)
            call.task = self._spawn(self._run_call(call, stream, hello))

    async def _run_call(self, call: _Call, stream: Stream, hello: Hello) -> None:
        """Put the events of a call into its stream; if the replica is lost before the first event, try another one."""
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
        """Return the fields that all hints of this client have in common."""
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
                            self._note_progress(call, hint, event)
                            stream.put(event)
        if call.running - call.complete:  # the replica has cancelled the call, as at its end: to Ray that is no error
            raise ReplicaLost(LOST_MESSAGE, call.replica)

    def _note_progress(self, call: _Call, hint: RequestHint, event: RequestEvent) -> None:
        if isinstance(event, Tokens) and event.request_id == call.submits[0].request_id:
            hint.add_output(event.tokens)
        if isinstance(event, Failed) or (isinstance(event, Tokens) and event.finish_reason is not None):
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
    async def send_query(self, what: QueryPayload, timeout: float | None = None) -> Answer:
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
    async def _query(self, what: QueryPayload) -> Answer:
        """Return the answer to a query. Raises ReplicaLost."""

    @abstractmethod
    def _invalidate_answers(self) -> None:
        """Note that answers kept from before are out of date."""

    async def _query_replica(self, replica: str, what: QueryPayload) -> ReplicaAnswer:
        return decode_answer(await self._calls.call("query", replica, encode(what)))

    @abstractmethod
    def choose_one(self) -> str:
        """Return the replica that answers what only one can answer. There is one if `hello` is not None."""

    def send_observed(self, observed: Observed) -> None:
        """Send counts to one replica's metrics; send those that do not arrive again with the next ones."""
        self.get_hello()
        self._counts.add(observed)
        message = self._counts.make_message(observed.memory_bytes)
        self._counts.clear()
        self._spawn(self._send_counts(self.choose_one(), message))

    async def _send_counts(self, replica: str, observed: Observed) -> None:
        try:
            await self._calls.call("observe", replica, encode(observed))
        except ReplicaLost:
            self._counts.add(observed)

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


def group_by_prompt(submits: Sequence[Submit]) -> list[list[Submit]]:
    """Return the requests in groups, each with the choices (n > 1) of one prompt, which share their computation."""
    groups: dict[str, list[Submit]] = {}
    for submit in submits:
        groups.setdefault(submit.sibling_of or submit.request_id, []).append(submit)
    return list(groups.values())
