"""An API worker's end of the socket to the engine: a stream of events for each request.

Reconnects for ever, as the engine may be loading or restarting. Knows messages, but neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal, cast

import msgspec

from server.engine.ipc.messages import (
    Admitted,
    Answer,
    Cancel,
    Command,
    Compared,
    Explained,
    Failed,
    FromEngine,
    Hello,
    Observed,
    Profile,
    Query,
    Question,
    ReadingCommand,
    RequestEvent,
    Submit,
    ToEngine,
    Tokens,
)
from server.processes.framing import FrameDecoder, WireError, encode_frame

log = logging.getLogger(__name__)

RECONNECT_DELAY = 0.02  # seconds between two attempts to connect
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])


def encode_message(message: ToEngine) -> bytes:
    """Return a message to the engine as a frame. Raises WireError when it is too long."""
    return encode_frame(_ENCODER.encode(message))


def make_event_decoder() -> FrameDecoder[list[FromEngine]]:
    """Return a decoder of frames that the engine sends: each holds the events of one step."""
    return FrameDecoder(_DECODER.decode)


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


class EngineClient:
    """A client of the engine at the Unix socket `path` from `start` (or `async with`) to `close`, in one event loop."""

    def __init__(self, path: str | os.PathLike[str], estimate_retry_after: Callable[[], float] = lambda: 0.0) -> None:
        """Make an unconnected client; `estimate_retry_after` returns seconds until a lost engine is expected back."""
        self.hello: Hello | None = None  # what the engine serves; None while it is not connected
        self.query_timeout = 10.0  # seconds to wait for an answer, which the engine gives between two steps
        # `epoch` is replaced after each command and for each new engine: answers kept from before are then out of date
        self.epoch = object()
        self.estimate_retry_after = estimate_retry_after
        self._path = os.fspath(path)
        self._connection: _Connection | None = None
        self._streams: dict[str, Stream] = {}  # by request id
        # Seconds that the last admitted request had waited: an estimate of when a full queue has room
        self._queue_seconds = 0.0
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._query_ids = itertools.count()
        self._task: asyncio.Task[None] | None = None
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
        self._send(*submits)
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

    def fail_all(self, error: Exception) -> None:
        """Fail every running and every later request with `error`."""
        self._end_error = error
        for stream in set(self._streams.values()):
            stream.fail(error)

    async def query(self, what: Question | Command | Profile, timeout: float | None = None) -> bytes:
        """Return the body of the engine's answer. Raises EngineRefused for an error, and EngineLost as `send_query`."""
        answer = await self.send_query(what, timeout)
        if answer.error is not None:
            raise EngineRefused(answer.error)
        return answer.body

    async def send_query(self, what: Question | Command | Profile, timeout: float | None = None) -> Answer:
        """Return the engine's answer, which may be a refusal.

        Raises EngineLost if there is no engine, or none has answered after `timeout` seconds (None: `query_timeout`).
        """
        timeout = self.query_timeout if timeout is None else timeout
        query_id = next(self._query_ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(Query(query_id, what))
        self._queries[query_id] = future
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise self._make_lost_error(f"the engine did not answer within {timeout:g} s; try again") from None
        finally:
            self._queries.pop(query_id, None)
            if not isinstance(what, str | Profile | ReadingCommand):
                self.epoch = object()

    def send_observed(self, observed: Observed) -> None:
        """Send the engine this worker's response counts and memory. Raises EngineLost while there is no engine."""
        self._send(observed)

    def _cancel(self, message: Cancel) -> None:
        with contextlib.suppress(EngineLost):
            self._send(message)

    def _send(self, *messages: ToEngine) -> None:
        """Send messages in one write, so that the choices of one prompt arrive together."""
        self.get_hello()
        assert self._connection is not None, "a client with a Hello is connected"
        if self._connection.transport.is_closing():  # the engine has just ended, and `hello` is still that of its start
            raise self._make_lost_error("the engine is not ready; try again")
        self._connection.transport.write(b"".join(map(encode_message, messages)))

    # ------------------------------------------------------------ the connection
    async def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name="engine-client")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stay_connected(self) -> None:
        while True:
            try:
                _, connection = await asyncio.get_running_loop().create_unix_connection(
                    self._make_connection, self._path
                )
            except OSError:  # not there yet
                pass
            else:
                await self._receive_until_closed(connection)
            await asyncio.sleep(RECONNECT_DELAY)

    def _make_connection(self) -> _Connection:
        self._connection = _Connection(self._dispatch)
        return self._connection

    async def _receive_until_closed(self, connection: _Connection) -> None:
        """Receive events until the connection ends; then all streams and queries fail with EngineLost."""
        try:
            await connection.closed
            log.warning("the engine hung up; connecting again")
        except (WireError, OSError) as error:
            log.warning("the connection to the engine broke: %s; connecting again", error)
        finally:
            self._handle_disconnect()
            connection.transport.abort()

    def _dispatch(self, event: FromEngine) -> None:
        match event:
            case Hello():
                self.hello, self.epoch = event, object()
                log.info("connected to the engine, which serves %s", event.model)
            case Answer():
                answer = self._queries.get(event.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case _:
                if isinstance(event, Admitted):
                    self._queue_seconds = event.queue_seconds
                if isinstance(event, Failed) and event.code == "queue_full":
                    event = msgspec.structs.replace(event, retry_after=self._queue_seconds)
                stream = self._streams.get(event.request_id)
                if stream is not None:  # without a stream, the request was cancelled while the event was on its way
                    stream.put(event)

    def _handle_disconnect(self) -> None:
        self.hello = self._connection = None
        for stream in set(self._streams.values()):
            stream.fail(self._make_lost_error("the engine went away while it worked on this request; try again"))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self._make_lost_error("the engine went away before it had answered; try again"))
        self._streams.clear()

    def _make_lost_error(self, message: str) -> EngineLost:
        return EngineLost(message, self.estimate_retry_after())


class _Connection(asyncio.Protocol):
    """A connection to the engine, which passes each event to `dispatch` as it arrives."""

    transport: asyncio.WriteTransport

    def __init__(self, dispatch: Callable[[FromEngine], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dispatch = dispatch
        self._frames = make_event_decoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for events in self._frames.feed(data):
                for event in events:
                    self._dispatch(event)
        except WireError as error:
            self.connection_lost(error)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(error)
