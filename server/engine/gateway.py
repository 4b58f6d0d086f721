"""The engine's end of the socket: hands its thread the workers' messages, and the workers its events.

Runs its own thread and event loop, so that the engine's thread never waits for a worker. Knows no request: it moves
messages. Messages arrive in `inbox` in the order in which a worker sent them; its last one is Gone.
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
from typing import Any

import msgspec

from server.engine import wire
from server.engine.messages import FromEngine, Hello, ToEngine

log = logging.getLogger(__name__)

MAX_UNREAD = 64 * 2**20  # bytes a worker may leave unread; then it is taken for stuck and hung up on


class Gone(msgspec.Struct, frozen=True):
    """The worker's connection has ended; nobody is left to hear of its requests."""


class Gateway:
    """Serves the Unix socket `path` from `start` (or `with`) to `close`. Each worker is greeted with `hello`."""

    def __init__(self, path: str | os.PathLike[str], hello: Hello) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, ToEngine | Gone]] = queue.SimpleQueue()
        self._path = os.fspath(path)
        self._greeting = wire.frame([hello])
        self._worker_ids = itertools.count()
        self._writers: dict[int, asyncio.StreamWriter] = {}  # touched by the gateway's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._listening: Future[None] = Future()

    # ------------------------------------------------------------ any thread
    def start(self) -> None:
        """Returns when workers can connect. Raises OSError when the socket cannot be made."""
        self._thread.start()
        self._listening.result()

    def send(self, worker_id: int, events: list[FromEngine]) -> None:
        """Sends one frame without waiting. A worker that is gone, or a closed gateway, is no error."""
        self._soon(self._send, worker_id, events)

    def close(self) -> None:
        """Hangs up on all workers and removes the socket; returns when the thread has ended. May be called twice."""
        self._soon(self._stop.set)
        self._thread.join()

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        """Has the gateway's thread call it."""
        assert self._loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # ------------------------------------------------------------ the gateway's thread
    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._listening.done():
                raise
            self._listening.set_exception(error)

    async def _serve(self) -> None:
        """Until `close`."""
        self._loop = asyncio.get_running_loop()
        listener = _listen(self._path)
        server = await asyncio.start_unix_server(self._on_connection, sock=listener, limit=wire.READ_AHEAD)
        self._listening.set_result(None)
        await self._stop.wait()
        server.close()
        while connections := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._writers.values():
                writer.transport.abort()
            await asyncio.wait(connections, timeout=0.01)  # again: one may just have been accepted
        with contextlib.suppress(FileNotFoundError):  # Python 3.13 removes it itself
            os.unlink(self._path)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker_id = next(self._worker_ids)
        self._writers[worker_id] = writer
        writer.write(self._greeting)
        try:
            async for message in wire.to_engine(reader):
                self.inbox.put((worker_id, message))
        except (wire.WireError, OSError) as error:
            log.warning("the connection of API worker %d ends: %s", worker_id, error)
        finally:
            del self._writers[worker_id]
            writer.transport.abort()
            self.inbox.put((worker_id, Gone()))

    def _send(self, worker_id: int, events: list[FromEngine]) -> None:
        writer = self._writers.get(worker_id)
        if writer is None:
            return
        writer.write(wire.frame(events))
        if writer.transport.get_write_buffer_size() > MAX_UNREAD:
            log.error("API worker %d does not read: hanging up", worker_id)
            writer.transport.abort()


def _listen(path: str) -> socket.socket:
    """A listening socket at `path`, for this user only; a socket left there by a dead engine is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # before listen(): nobody can have connected
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
