"""The engine's process: builds the engine, then answers the workers' messages between steps, in one thread.

Knows the socket's gateway and the core; nothing of HTTP.
"""

from __future__ import annotations

import logging
import queue
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import msgspec

from config.errors import SettingsError
from config.settings import Settings
from server.engine.about import about, describe_caches, summary
from server.engine.admin import obey
from server.engine.build import Engine, build_engine
from server.engine.core import Event
from server.engine.gateway import Gateway, Gone
from server.engine.messages import (
    Answer,
    Cancel,
    Command,
    Failed,
    FromEngine,
    Hello,
    Observed,
    Query,
    Question,
    Strategy,
    Submit,
    ToEngine,
)
from server.engine.request import RequestError
from server.engine.state import Processes, state_of
from server.metrics.registry import Metrics

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long an idle engine sleeps before it looks whether to stop
STALLED_SECONDS = 0.001  # pause when nobody who runs could be scheduled


def run(settings: Settings, socket_path: str, status: Connection, restarts: int = 0) -> None:
    """Serves until SIGTERM. Tells `status` {"ready": summary} or {"error": what the user must change}.

    `restarts`: how many engines were there before this one.
    """
    try:
        engine = build_engine(settings)
    except SettingsError as error:
        status.send({"error": str(error)})
        return
    hello = Hello(
        engine.name,
        list(engine.aliases),
        engine.max_seq_len,
        engine.core.model.facts.vocab_size,
        [Strategy(d.name, d.kind) for d in engine.instances],
    )
    with Gateway(socket_path, hello) as gateway:
        loop = Loop(engine, gateway, restarts)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's to handle
        status.send({"ready": summary(engine)})
        loop.run()


class Loop:
    """Messages, a step, events; again."""

    def __init__(self, engine: Engine, gateway: Gateway, restarts: int = 0) -> None:
        self._engine = engine
        self._core = engine.core
        self._gateway = gateway
        self._about = about(engine, restarts)
        self._metrics = Metrics(self._about)
        self._processes = Processes()
        self._stopping = False

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stopping:
            self._send([event for message in self._messages(pause) for event in self._handle(*message)])
            result = self._core.step()
            self._send(result.events)
            self._metrics.observe(result.report, result.finished)
            pause = 0.0 if result.report.rows else STALLED_SECONDS if self._core.busy else IDLE_SECONDS

    def stop(self) -> None:
        """Ends run() after the step in progress."""
        self._stopping = True

    def _messages(self, pause: float) -> Iterator[tuple[int, ToEngine | Gone]]:
        """What has come in; waits up to `pause` seconds for a first message."""
        try:
            yield self._gateway.inbox.get(block=pause > 0, timeout=pause or None)
            while True:
                yield self._gateway.inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, worker: int, message: ToEngine | Gone) -> Sequence[Event]:
        match message:
            case Submit():
                refused = self._core.submit(worker, message)
                return [refused] if refused else []
            case Cancel(request_id, outcome):
                self._core.cancel(worker, request_id, outcome)
            case Query(query_id, what):
                return [Event(worker, self._answer(query_id, what))]
            case Observed(responses, memory):
                self._metrics.observe_responses(responses)
                self._processes.told(worker, memory)
            case Gone():
                self._core.cancel_worker(worker)
                self._processes.gone(worker)
        return []

    def _answer(self, query_id: int, what: Question | Command) -> Answer:
        """A strategy of somebody's own may fail to tell or to obey; the engine goes on."""
        try:
            return Answer(query_id, self._told(what))
        except RequestError as error:
            return Answer(query_id, b"", error.told())
        except Exception:
            log.exception("no answer to %s", what if isinstance(what, str) else type(what).__name__)
            return Answer(query_id, b"", Failed("", 500, "the engine failed to answer; the server's log tells more"))

    def _told(self, what: Question | Command) -> bytes:
        match what:
            case "kv_cache":
                return msgspec.json.encode({"object": "list", "data": describe_caches(self._engine)})
            case "settings":
                return msgspec.json.encode(self._about.settings)
            case "metrics" | "openmetrics":
                state = state_of(self._core, self._processes.resident())
                return self._metrics.exposition(state, openmetrics=what == "openmetrics")
        return msgspec.json.encode(obey(self._core, what))

    def _send(self, events: Sequence[Event]) -> None:
        by_worker: dict[int, list[FromEngine]] = defaultdict(list)
        for worker, message in events:
            by_worker[worker].append(message)
        for worker, messages in by_worker.items():
            self._gateway.send(worker, messages)
