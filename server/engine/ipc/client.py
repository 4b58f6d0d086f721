"""What an API process knows an engine by: a stream of events for each request, and answers to queries.

Does not know how messages get to the engine: over a socket (socket_client.py), or to one of several replicas
(server/cluster/client.py). Knows messages, but neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal

from server.engine.ipc.messages import (
    Answer,
    Cancel,
    Compared,
    Explained,
    Failed,
    Hello,
    Observed,
    Profile,
    QueryPayload,
    ReadingCommand,
    RequestEvent,
    Submit,
    Tokens,
)


class EngineRefused(Exception):
    """The engine refused a query, or failed to answer it; `error` has the HTTP status and the message."""

    def __init__(self, refused: Failed) -> None:
        super().__init__(refused.message)
        self.error = refused


class EngineLost(Exception):
    """There is no engine, or it ended before it had answered; the next engine is expected in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stream:
    """The events of requests that were submitted together, until all have ended. Made by `EngineClient.stream`."""

    def __init__(self, submits: Iterable[Submit], send_cancel: Callable[[Cancel], None]) -> None:
        # By request id: the kinds of events of which the last one is still to be read
        self._awaited = {submit.request_id: find_awaited_events(submit) for submit in submits}
        self._running = set(self._awaited)  # ids of requests whose last event was not read yet
        # Ids of running requests that were stopped: only their Explained and Compared are still to be read
        self._stopped: set[str] = set()
        self._send_cancel = send_cancel
        self._events: deque[RequestEvent | Exception] = deque()
        # future that a waiting reader awaits; resolved by the next event
        self._arrival: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestEvent:
        """Return the next event. Raises EngineLost when the connection is lost, and any error passed to `fail`."""
        while self._running:
            if (event := self.get_nowait()) is not None:
                return event
            if self._running:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
        raise StopAsyncIteration

    def get_nowait(self) -> RequestEvent | None:
        """Return the next event if it has arrived, else None.

        Raises the errors that `__anext__` raises, after the events that arrived before them.
        """
        while self._running and self._events:
            event = self._events.popleft()
            if isinstance(event, EngineLost):
                self._running.clear()  # forget the requests: there is no engine that could cancel them
            if isinstance(event, Exception):
                self.cancel_all("error")
                raise event
            if event.request_id not in self._running:  # it was cancelled
                continue
            if self._note_arrival(event):
                self._running.remove(event.request_id)
            if not (event.request_id in self._stopped and isinstance(event, Tokens)):
                return event
        return None

    def cancel(self, request_id: str, outcome: Literal["cancelled", "stop", "error"] = "cancelled") -> None:
        """Stop one request: no more of its events are delivered, except Explained and Compared if `outcome` is "stop".

        Does nothing for a request that has ended.
        """
        if request_id not in self._running:
            return
        self._awaited[request_id].discard(Tokens)
        if outcome == "stop" and self._awaited[request_id]:
            self._stopped.add(request_id)
        else:
            self._running.remove(request_id)
        self._send_cancel(Cancel(request_id, outcome))

    def cancel_all(self, outcome: Literal["cancelled", "error"] = "cancelled") -> None:
        for request_id in list(self._running):
            self.cancel(request_id, outcome)

    def _note_arrival(self, event: RequestEvent) -> bool:
        """Note that an event was read; return whether it is its request's last."""
        awaited = self._awaited[event.request_id]
        match event:
            case Failed():
                awaited.clear()
            case Explained() | Tokens(finish_reason=str()) | Compared(is_last=True):
                awaited.discard(type(event))
        return not awaited

    def put(self, event: RequestEvent | Exception) -> None:
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader of the events, after the events that have arrived."""
        self.put(error)


def find_awaited_events(submit: Submit) -> set[type[RequestEvent]]:
    """Return the kinds of events whose last one has to arrive before a request has ended without a failure."""
    awaited: set[type[RequestEvent]] = {Tokens}
    if submit.explain:
        awaited.add(Explained)
    if submit.reference is not None:
        awaited.add(Compared)
    return awaited


class EngineClient(ABC):
    """What an API process needs of an engine, or of several, from `start` (or `async with`) to `close`.

    Used in one event loop. `SocketClient` speaks to the engine of this machine.
    """

    def __init__(self, estimate_retry_after: Callable[[], float] = lambda: 0.0) -> None:
        """Make an unconnected client; `estimate_retry_after` returns seconds until a lost engine is expected back."""
        self.hello: Hello | None = None  # what the engine serves; None while it is not connected
        self.query_timeout = 10.0  # seconds to wait for an answer, which the engine gives between two steps
        # `epoch` is replaced after each command and for each new engine: answers kept from before are then out of date
        self.epoch = object()
        self.estimate_retry_after = estimate_retry_after
        self._streams: dict[str, Stream] = {}  # by request id
        self._end_error: Exception | None = None  # the error passed to `fail_all`, raised for every further request

    def get_hello(self) -> Hello:
        """Return the Hello of the engine, which tells what it serves. Raises EngineLost while it is not connected."""
        if self.hello is None:
            raise self._make_lost_error("the engine is not ready; try again")
        return self.hello

    # ------------------------------------------------------------ requests
    @contextlib.asynccontextmanager
    async def stream(self, submits: Sequence[Submit]) -> AsyncIterator[Stream]:
        """Run requests; those that have not ended when the `with` block is left, also by an exception, are cancelled.

        Raises EngineLost when there is no engine, and the error passed to `fail_all` after that was called.
        """
        if self._end_error is not None:
            raise self._end_error
        stream = Stream(submits, self._cancel)
        self._submit(stream, submits)
        self._streams |= {submit.request_id: stream for submit in submits}
        try:
            yield stream
        except Exception:  # an error; not a client that disconnects: that raises CancelledError
            stream.cancel_all("error")
            raise
        finally:
            stream.cancel_all()
            for submit in submits:
                self._streams.pop(submit.request_id, None)

    @abstractmethod
    def _submit(self, stream: Stream, submits: Sequence[Submit]) -> None:
        """Send requests, and have their events put into `stream`. Raises EngineLost when there is no engine."""

    @abstractmethod
    def _cancel(self, message: Cancel) -> None:
        """Send a Cancel; do nothing when there is no engine."""

    def fail_all(self, error: Exception) -> None:
        """Fail every running and every later request with `error`."""
        self._end_error = error
        for stream in set(self._streams.values()):
            stream.fail(error)

    async def query(self, what: QueryPayload, timeout: float | None = None) -> bytes:
        """Return the body of the engine's answer. Raises EngineRefused for an error, and EngineLost as `send_query`."""
        answer = await self.send_query(what, timeout)
        if answer.error is not None:
            raise EngineRefused(answer.error)
        return answer.body

    @abstractmethod
    async def send_query(self, what: QueryPayload, timeout: float | None = None) -> Answer:
        """Return the engine's answer, which may be a refusal.

        Raises EngineLost if there is no engine, or none has answered after `timeout` seconds (None: `query_timeout`).
        """

    @abstractmethod
    def send_observed(self, observed: Observed) -> None:
        """Send the engine this worker's response counts and memory. Raises EngineLost while there is no engine."""

    def _make_lost_error(self, message: str) -> EngineLost:
        return EngineLost(message, self.estimate_retry_after())

    # ------------------------------------------------------------ the connection
    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def changes_answers(what: QueryPayload) -> bool:
    """Return whether a query may change the answers to questions, so that those kept from before are out of date."""
    return not isinstance(what, str | Profile | ReadingCommand)
