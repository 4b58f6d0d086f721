"""The engine's end of the socket: takes the API workers' messages, and sends them events.

A thread of its own reads, so that the engine's thread never waits for a worker. The engine's thread writes events
itself, as far as the socket has room. Knows no request: it moves messages. A worker's messages are in `inbox` in the
order in which it sent them; the last one is a WorkerDisconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from server.engine.ipc.messages import FromEngine, Hello, ToEngine
from server.processes.framing import FrameDecoder, WireError, encode_frame

log = logging.getLogger(__name__)

MAX_READ_BYTES = 2**18  # maximum bytes that one call of recv() returns
ACCEPT_RETRY_DELAY = 0.1  # seconds from a failed accept() to the next
MAX_UNREAD_BYTES = 64 * 2**20  # a worker that leaves more bytes unread is taken for stuck, and its connection is closed


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode_events(events: list[FromEngine]) -> bytes:
    """Return the events for a worker as one frame. Raises WireError when it is too long."""
    return encode_frame(_ENCODER.encode(events))


def make_message_decoder() -> FrameDecoder[ToEngine]:
    """Return a decoder of frames that a worker sends: each holds one message."""
    return FrameDecoder(_DECODER.decode)


class WorkerDisconnected(msgspec.Struct, frozen=True):
    """Follows an API worker's last message: its connection has ended, so its requests can be cancelled."""


class EngineServer:
    """Serves the Unix socket `path` from `start` (or `with`) to `close`. Each worker first receives `hello`."""

    def __init__(self, path: str | os.PathLike[str], hello: Hello) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, ToEngine | WorkerDisconnected]] = queue.SimpleQueue()
        self._path = os.fspath(path)
        self._greeting = encode_events([hello])
        self._worker_ids = itertools.count()
        self._workers: dict[
            int, WorkerConnection
        ] = {}  # sockets by worker id; only the server's thread changes the dict
        self._worker_tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine-ipc", daemon=True)
        self._listening: Future[None] = Future()

    # ------------------------------------------------------------ any thread
    def start(self) -> None:
        """Start the thread; return when workers can connect. Raises OSError when the socket cannot be made."""
        self._thread.start()
        self._listening.result()

    def send(self, worker_id: int, events: list[FromEngine]) -> None:
        """Send a worker events without waiting until it reads them. Does nothing if it is gone or the server is closed.

        The caller's thread writes to the socket itself: waking another thread for every step takes longer than that.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        try:
            unsent = worker.send(encode_events(events))
            if unsent > MAX_UNREAD_BYTES:
                raise WireError("it does not read its events")
            if unsent:
                self._call_soon_threadsafe(self._flush_when_writable, worker_id)
        except WireError as error:
            log.error("API worker %d: %s; hanging up", worker_id, error)
            worker.hang_up()

    def close(self) -> None:
        """Hang up on all workers and remove the socket; return when the thread has ended. May be called twice."""
        self._call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call_soon_threadsafe(self, function: Callable[..., None], *args: object) -> None:
        """Have the server's thread call a function; do nothing if the server is closed."""
        assert self._loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------ the server's thread
    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._listening.done():
                raise
            self._listening.set_exception(error)

    async def _serve(self) -> None:
        """Serve workers until `close` is called."""
        self._loop = asyncio.get_running_loop()
        with _listen(self._path) as listener:
            accepting = asyncio.create_task(self._accept(listener))
            self._listening.set_result(None)
            await self._stop.wait()
            accepting.cancel()
            await asyncio.wait([accepting])
        while self._worker_tasks:
            for worker in self._workers.values():
                worker.hang_up()
            # The wait is repeated, as another worker may just have been accepted
            await asyncio.wait(self._worker_tasks, timeout=0.01)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # for example too many open files; the worker waits to be accepted
                log.warning("an API worker cannot connect: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_DELAY)
                continue
            conversation = asyncio.create_task(self._serve_worker(next(self._worker_ids), WorkerConnection(connection)))
            self._worker_tasks.add(conversation)
            conversation.add_done_callback(self._worker_tasks.discard)

    async def _serve_worker(self, worker_id: int, worker: WorkerConnection) -> None:
        loop, frames = asyncio.get_running_loop(), make_message_decoder()
        self._workers[worker_id] = worker
        try:
            worker.send(self._greeting)
            while data := await loop.sock_recv(worker.socket, MAX_READ_BYTES):
                for message in frames.feed(data):
                    self.inbox.put((worker_id, message))
        except (WireError, OSError) as error:
            log.warning("the connection of API worker %d ends: %s", worker_id, error)
        finally:
            del self._workers[worker_id]
            loop.remove_writer(worker.socket)
            worker.close()
            self.inbox.put((worker_id, WorkerDisconnected()))

    def _flush_when_writable(self, worker_id: int) -> None:
        """Send a worker's unsent bytes as soon as its socket has room."""
        if (worker := self._workers.get(worker_id)) is not None:
            asyncio.get_running_loop().add_writer(worker.socket, self._flush, worker)

    def _flush(self, worker: WorkerConnection) -> None:
        if worker.send(b"") == 0:
            asyncio.get_running_loop().remove_writer(worker.socket)


class WorkerConnection:
    """A worker's socket, and the bytes that did not fit into it yet. Any thread may write; none waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._unsent = bytearray()
        self._lock = threading.Lock()
        connection.setblocking(False)

    def send(self, data: bytes) -> int:
        """Send the bytes that remain from earlier calls, then `data`, as far as they fit; return how many remain.

        If the connection is lost, all are dropped, and 0 is returned; the thread that reads the socket handles that.
        """
        with self._lock:
            try:
                if self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
                if data and not self._unsent:
                    data = data[self.socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
                return 0
            self._unsent += data
            return len(self._unsent)

    def hang_up(self) -> None:
        """Shut the socket down, so that both ends read the end of the connection."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self.socket.close()


def _listen(path: str) -> socket.socket:
    """Return a listening socket at `path`, for this user only; a socket left there by a dead engine is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # set before listen(), so no process can have connected with other permissions
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
