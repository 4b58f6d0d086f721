"""An API process: tokenizer, connection to the engine, and uvicorn on a socket that is listening already.

Imports neither torch nor transformers, so that it starts at once and stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from config.settings import Settings
from config.sizes import parse_bytes
from server.api.app import create_app
from server.api.http.connection import make_connection_class
from server.api.http.errors import ApiError
from server.api.ops.live import LiveState
from server.api.ops.monitoring import Observations
from server.engine.ipc.client import EngineClient
from server.engine.ipc.socket_client import SocketClient
from server.logs import hide_exception_messages
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import WorkerHandles
from server.text.processes.messages import ChatDefaults
from server.text.processes.sandbox import CallLimits, SandboxedTokenizer
from server.text.tokenizer import TokenizerBase

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
SHUTDOWN_GRACE = 3  # seconds after drain_seconds to send the last errors; the supervisor waits a little longer


def serve_worker(
    settings: Settings,
    socket_path: str | os.PathLike[str],
    listening_socket: socket.socket,
    handles: WorkerHandles | None = None,
) -> None:
    """Serve HTTP in this process until STOP_SIGNAL, then finish the running requests and return.

    Raises SettingsError for settings or a tokenizer that cannot be used.
    """
    if not settings.log_prompts:
        hide_exception_messages()
    allow_many_connections()
    tokenizer = make_tokenizer(settings)
    if handles is None:
        ApiServer(settings, SocketClient(socket_path), tokenizer).run(sockets=[listening_socket])
        return
    client, metrics = SocketClient(socket_path, handles.recovery.estimate_seconds), handles.metrics_socket
    sockets = [listening_socket] if metrics is None else [listening_socket, metrics]
    ApiServer(settings, client, tokenizer, metrics, beat=handles.heartbeat.beat).run(sockets=sockets)


def make_tokenizer(settings: Settings) -> SandboxedTokenizer:
    """Return the tokenizer of the model in the directory `settings.model`. Raises SettingsError if there is none."""
    limits = CallLimits(settings.text_timeout, parse_bytes(settings.text_memory))
    grammar_limits = CallLimits(settings.grammar_timeout, parse_bytes(settings.grammar_memory))
    chat = ChatDefaults(settings.split_special_tokens, settings.default_chat_template_kwargs)
    return SandboxedTokenizer(Path(settings.model), limits, grammar_limits, chat=chat)


class ApiServer(uvicorn.Server):
    """The application in uvicorn. At shutdown, requests that do not end within drain_seconds get an error."""

    def __init__(
        self,
        settings: Settings,
        client: EngineClient,
        tokenizer: TokenizerBase,
        metrics_socket: socket.socket | None = None,
        *,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap the application; `beat` (heartbeat) is called every 0.1 s; /metrics is on `metrics_socket` if given."""
        self._client = client
        self._beat = beat
        self._drain_seconds = settings.drain_seconds
        observations = Observations(client)
        self._live_state = LiveState(client)
        metrics_port = None if metrics_socket is None else metrics_socket.getsockname()[1]
        config = uvicorn.Config(
            create_app(settings, client, tokenizer, observations, self._live_state, metrics_port),
            loop="uvloop",
            http=make_connection_class(
                settings.max_header_bytes, settings.header_timeout, settings.body_timeout, observations.count_response
            ),
            ws="none",
            lifespan="on",
            log_config=None,  # logging is configured already
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + SHUTDOWN_GRACE,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle STOP_SIGNAL instead of the signals that uvicorn handles: those are for the supervisor alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(STOP_SIGNAL, self._stop)
        try:
            yield
        finally:
            signal.signal(STOP_SIGNAL, before)

    def _stop(self, *_: object) -> None:
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self._beat()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_exception)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        error = ApiError(
            503,
            "the server stops, and the request did not end in time; try again",
            code="server_stopping",
            retry_after=self._client.estimate_retry_after(),
        )
        asyncio.get_running_loop().call_later(self._drain_seconds, self._client.fail_all, error)
        self._live_state.stop()  # those streams would never end
        await super().shutdown(sockets)


def allow_many_connections() -> None:
    """Raise the limit of open files, as each connection is one: the usual limit is 1024 or fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception without asyncio's message, which may quote what clients sent."""
    log.error("a task or a callback failed", exc_info=context.get("exception"))
