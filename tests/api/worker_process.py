"""An API worker in a process of its own, as in production, whose event loop and memory are watched from outside."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import httpx
import psutil

from config.settings import Settings
from server.api.worker import ApiServer
from server.engine.ipc.messages import Hello
from server.engine.ipc.socket_client import SocketClient
from server.text.tokenizer import Tokenizer
from tests.api.conftest import CHAT
from tests.api.fake_engine import FakeEngine, generates
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import byte_level

TICK = 0.002  # seconds


class WatchedServer(ApiServer):
    """Notes the most processor time that the loop's thread took between two turns of a task."""

    def __init__(self, longest: Synchronized[float], *args: Any) -> None:
        super().__init__(*args)
        self._longest = longest

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(TICK)
            now = time.thread_time()
            self._longest.value = max(self._longest.value, now - before)
            before = now


def serve(longest: Synchronized[float], listener: socket.socket, path: str, settings: dict[str, Any]) -> None:
    client = SocketClient(path)
    WatchedServer(longest, Settings(**settings), client, Tokenizer(byte_level(), CHAT)).run(sockets=[listener])


class Worker:
    """The process as its tests see it."""

    def __init__(self, url: str, pid: int, longest: Synchronized[float]) -> None:
        self.url = url
        self._process = psutil.Process(pid)
        self._longest = longest

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return int(self._process.memory_info().rss)

    def begin_again(self) -> None:
        self._longest.value = 0.0

    @property
    def longest_turn(self) -> float:
        """Seconds of processor time, since `begin_again`."""
        httpx.get(f"{self.url}/health", timeout=PATIENCE)  # a turn later what came before is noted
        return self._longest.value

    def await_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=PATIENCE).status_code == 200:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextlib.contextmanager
def running_worker(hello: Hello, **settings: Any) -> Iterator[Worker]:
    """A worker with a fake engine, which lives here."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="kvmux-") as directory,
        FakeEngine(Path(directory) / "engine.sock", generates([100]), hello),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        longest = context.Value("d", 0.0)
        path = str(Path(directory) / "engine.sock")
        process = context.Process(target=serve, args=(longest, listener, path, settings), daemon=True)
        process.start()
        assert process.pid is not None
        worker = Worker(f"http://127.0.0.1:{listener.getsockname()[1]}", process.pid, longest)
        try:
            worker.await_ready()
            yield worker
        finally:
            process.terminate()
            process.join()
