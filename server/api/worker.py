"""An API process: tokenizer, connection to the engine, and uvicorn on a socket that is listening already.

Imports neither torch nor transformers, so that it starts at once and stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from config.settings import Settings
from server.api.app import create_app
from server.api.connection import connections
from server.api.errors import ApiError
from server.api.observations import Observations, Observing
from server.engine.client import EngineClient
from server.text.tokenizer import Tokenizer

KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that none is closed as it is used again
MOST_OPEN_FILES = 65_536
LAST_WORDS = 3  # seconds after the drain, for those who are told that it is over; the supervisor waits a little longer


def serve_worker(settings: Settings, socket_path: str | os.PathLike[str], listening_socket: socket.socket) -> None:
    """Serves until SIGTERM, then finishes what runs and exits. Raises SettingsError."""
    signal.signal(signal.SIGTERM, _exit)  # uvicorn has its own while it runs, and then raises the signal once more
    allow_many_connections()
    tokenizer = Tokenizer.from_directory(Path(settings.model))
    Server(settings, EngineClient(socket_path), tokenizer).run(sockets=[listening_socket])


class Server(uvicorn.Server):
    """The application in uvicorn. Requests that do not end while it drains get an error, not a cut connection."""

    def __init__(self, settings: Settings, client: EngineClient, tokenizer: Tokenizer) -> None:
        self._client = client
        self._drain_seconds = settings.drain_seconds
        observations = Observations(client)
        config = uvicorn.Config(
            Observing(create_app(settings, client, tokenizer, observations), observations),
            loop="uvloop",
            http=connections(
                settings.max_header_bytes, settings.header_timeout, settings.body_timeout, observations.responded
            ),
            ws="none",
            lifespan="on",
            log_config=None,  # the process has its logging
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + LAST_WORDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        error = ApiError(503, "the server stops, and the request did not end in time", code="server_stopping")
        asyncio.get_running_loop().call_later(self._drain_seconds, self._client.end, error)
        await super().shutdown(sockets)


def allow_many_connections() -> None:
    """Each is an open file, of which systems allow a process 1024 or fewer until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _exit(*_: object) -> None:
    sys.exit(0)
