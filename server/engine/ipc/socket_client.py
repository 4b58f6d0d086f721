"""An API worker's connection to the engine of its machine, over a Unix socket.

Reconnects for ever, as the engine may be loading or restarting. Knows messages, but neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from server.engine.ipc.client import EngineClient, EngineLost, Stream, changes_answers
from server.engine.ipc.messages import (
    Admitted,
    Answer,
    Cancel,
    Failed,
    FromEngine,
    Hello,
    Observed,
    Query,
    QueryPayload,
    RolloutQuestion,
    RolloutSamples,
    Submit,
    ToEngine,
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


class SocketClient(EngineClient):
    """A client of the engine at the Unix socket `path` from `start` (or `async with`) to `close`, in one event loop."""

    def __init__(self, path: str | os.PathLike[str], estimate_retry_after: Callable[[], float] = lambda: 0.0) -> None:
        """Make an unconnected client; `estimate_retry_after` returns seconds until a lost engine is expected back."""
        super().__init__(estimate_retry_after)
        self._socket = EngineSocket(path, self._dispatch, self._handle_disconnect)
        # Seconds that the last admitted request had waited: an estimate of when a full queue has room
        self._queue_seconds = 0.0
        self._queries: dict[int, asyncio.Future[Answer]] = {}
        self._query_ids = itertools.count()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ requests
    def _submit(self, stream: Stream, submits: Sequence[Submit]) -> None:
        self._send(*submits)

    async def send_query(self, what: QueryPayload, timeout: float | None = None) -> Answer:
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
            if changes_answers(what):
                self.epoch = object()

    def send_observed(self, observed: Observed) -> None:
        self._send(observed)

    def _cancel(self, message: Cancel) -> None:
        with contextlib.suppress(EngineLost):
            self._send(message)

    def _send(self, *messages: ToEngine) -> None:
        """Send messages in one write, so that the choices of one prompt arrive together."""
        self.get_hello()
        if not self._socket.send(*messages):  # the engine has just ended, and `hello` is still that of its start
            raise self._make_lost_error("the engine is not ready; try again")

    # ------------------------------------------------------------ the connection
    async def start(self) -> None:
        self._task = asyncio.create_task(self._socket.stay_connected(), name="engine-client")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _dispatch(self, event: FromEngine) -> None:
        match event:
            case Hello():
                self.hello, self.epoch = event, object()
                log.info("connected to the engine, which serves %s", event.model)
            case Answer():
                answer = self._queries.get(event.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case RolloutQuestion() | RolloutSamples():
                raise AssertionError("only the controller of roll-outs gets these")
            case _:
                if isinstance(event, Admitted):
                    self._queue_seconds = event.queue_seconds
                if isinstance(event, Failed) and event.code == "queue_full":
                    event = msgspec.structs.replace(event, retry_after=self._queue_seconds)
                stream = self._streams.get(event.request_id)
                if stream is not None:  # without a stream, the request was cancelled while the event was on its way
                    stream.put(event)

    def _handle_disconnect(self) -> None:
        self.hello = None
        for stream in set(self._streams.values()):
            stream.fail(self._make_lost_error("the engine went away while it worked on this request; try again"))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self._make_lost_error("the engine went away before it had answered; try again"))
        self._streams.clear()


class EngineSocket:
    """A connection to the engine at a Unix socket, which is made again whenever it ends."""

    def __init__(
        self, path: str | os.PathLike[str], dispatch: Callable[[FromEngine], None], on_lost: Callable[[], None]
    ) -> None:
        """Make an unconnected socket. `dispatch` takes each event; `on_lost` is called when a connection has ended."""
        self._path = os.fspath(path)
        self._dispatch = dispatch
        self._on_lost = on_lost
        self._connection: _Connection | None = None
        self._is_finishing = False

    def send(self, *messages: ToEngine) -> bool:
        """Send messages in one write; return False, and send none, if there is no connection or it has just ended."""
        if self._connection is None or self._connection.transport.is_closing():
            return False
        self._connection.transport.write(b"".join(map(encode_message, messages)))
        return True

    def finish(self) -> None:
        """Connect no more: `stay_connected` returns when there is no connection, or the present one has ended."""
        self._is_finishing = True

    async def stay_connected(self) -> None:
        """Connect, and pass on events, until `finish` is called."""
        while not self._is_finishing:
            try:
                _, connection = await asyncio.get_running_loop().create_unix_connection(
                    lambda: _Connection(self._dispatch), self._path
                )
            except OSError:  # not there yet
                pass
            else:
                self._connection = connection
                await self._receive_until_closed(connection)
            await asyncio.sleep(RECONNECT_DELAY)

    async def _receive_until_closed(self, connection: _Connection) -> None:
        """Receive events until the connection ends."""
        try:
            await connection.closed
            if not self._is_finishing:
                log.warning("the engine hung up; connecting again")
        except (WireError, OSError) as error:
            log.warning("the connection to the engine broke: %s; connecting again", error)
        finally:
            self._connection = None
            self._on_lost()
            connection.transport.abort()


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
