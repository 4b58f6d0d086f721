"""An API process: tokenizer, connection to the engine, and uvicorn on a socket that is listening already.

Imports neither torch nor transformers, so that it starts at once and stays small.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from config.settings import Settings
from server.api.app import create_app
from server.engine.client import EngineClient
from server.text.tokenizer import Tokenizer

KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that none is closed as it is used again
GRACE = 15  # seconds for running requests to end after SIGTERM; less than the supervisor waits


def serve_worker(settings: Settings, socket_path: str | os.PathLike[str], listening_socket: socket.socket) -> None:
    """Serves until SIGTERM, then finishes what runs and exits. Raises SettingsError."""
    signal.signal(signal.SIGTERM, _exit)  # uvicorn has its own while it runs, and then raises the signal once more
    tokenizer = Tokenizer.from_directory(Path(settings.model))
    app = create_app(settings, EngineClient(socket_path), tokenizer)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,  # the process has its logging
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
    )
    uvicorn.Server(config).run(sockets=[listening_socket])


def _exit(*_: object) -> None:
    sys.exit(0)
