"""The engine's loop: answers the workers' messages, computes a step, sends events; in one thread.

Knows the socket's server and the core; nothing of HTTP or Prometheus.
"""

from __future__ import annotations

import logging
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Protocol

import msgspec

from server.engine.admin import run_command
from server.engine.build import Engine
from server.engine.core import Event
from server.engine.info import (
    ProcessMemory,
    describe_caches,
    describe_memory,
    make_engine_info,
    read_engine_state,
    summarize_engine,
)
from server.engine.ipc.messages import (
    ANSWER_TTL,
    Answer,
    Cancel,
    Command,
    Failed,
    FromEngine,
    Observed,
    Profile,
    Query,
    Question,
    Submit,
    ToEngine,
)
from server.engine.ipc.server import Gateway, WorkerDisconnected
from server.engine.profiling.profiler import Profiler
from server.engine.scheduling.request import RequestError
from server.records import EngineInfo, EngineState, RequestRecord, StepReport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long an idle engine sleeps before it looks whether to stop
STALLED_SECONDS = 0.001  # pause when no running request could be scheduled


class StepObserver(Protocol):
    """Counts what the engine does, for /metrics."""

    def observe(self, report: StepReport, finished: Sequence[RequestRecord]) -> None:
        """Count a step, and the requests that ended with it."""
        ...

    def observe_responses(self, responses: Mapping[int, int]) -> None:
        """Count HTTP responses, by status."""
        ...

    def snapshot(self, state: EngineState) -> bytes:
        """Return all metrics, with these gauges, as API workers read them."""
        ...


class Loop:
    """Handles messages, computes a step, sends events; again and again."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        make_observer: Callable[[EngineInfo], StepObserver],
        restarts: int = 0,
        beat: Callable[[], None] = lambda: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a built engine; `make_observer` makes what counts its steps.

        `beat` is called in every turn: a step, or a wait of up to IDLE_SECONDS. `on_step` is called after every step
        that had something to compute.
        """
        self._engine = engine
        self._core = engine.core
        self._gateway = gateway
        self._beat = beat
        self._on_step = on_step
        self._about = make_engine_info(engine, restarts)
        self._observer = make_observer(self._about)
        self._processes = ProcessMemory()
        self._answers: dict[Question, Answer] = {}  # the latest answer to each question
        self._profiler = Profiler(engine.core.tracer, engine.device.tensors, summarize_engine(engine))
        self._stopping = False

    def run(self) -> None:
        pause = IDLE_SECONDS
        while not self._stopping:
            self._beat()
            self._send([event for message in self._receive_messages(pause) for event in self._handle(*message)])
            if pause == IDLE_SECONDS and self._engine.settings.check_integrity:
                self._core.check_integrity()
            with self._profiler.annotate_step(self._core.busy):
                result = self._core.step()
            if result.report.rows:
                self._on_step()
            self._send(result.events)
            self._observer.observe(result.report, result.finished)
            if (profiled := self._profiler.after_step(result.report.rows)) is not None:
                self._send([Event(*profiled)])
            pause = 0.0 if result.report.rows else STALLED_SECONDS if self._core.busy else IDLE_SECONDS

    def stop(self) -> None:
        """End run() after the step in progress."""
        self._stopping = True

    def _receive_messages(self, pause: float) -> Iterator[tuple[int, ToEngine | WorkerDisconnected]]:
        """Yield the messages that have come in; wait up to `pause` seconds for a first one."""
        try:
            yield self._gateway.inbox.get(block=pause > 0, timeout=pause or None)
            while True:
                yield self._gateway.inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, worker: int, message: ToEngine | WorkerDisconnected) -> Sequence[Event]:
        match message:
            case Submit():
                refused = self._core.submit(worker, message)
                return [refused] if refused else []
            case Cancel(request_id, outcome):
                self._core.cancel(worker, request_id, outcome)
            case Query(query_id, what) if not isinstance(what, Profile):
                return [Event(worker, self._answer(query_id, what))]
            case Query(query_id, Profile() as wanted):
                busy = self._profiler.begin(worker, query_id, wanted)
                return [Event(worker, busy)] if busy else []
            case Observed(responses, memory):
                self._observer.observe_responses(responses)
                self._processes.set_worker_memory(worker, memory)
            case WorkerDisconnected():
                self._core.cancel_worker(worker)
                self._processes.remove_worker(worker)
        return []

    def _answer(self, query_id: int, what: Question | Command) -> Answer:
        """Return an answer that is up to ANSWER_TTL seconds old, so that frequent questions cost the steps nothing."""
        if not isinstance(what, str):
            self._answers.clear()  # a command changes the answers
            return self._compute_answer(query_id, what)
        known = self._answers.get(what)
        if known is None or known.created_at + ANSWER_TTL <= monotonic():
            known = self._answers[what] = self._compute_answer(query_id, what)
        return msgspec.structs.replace(known, query_id=query_id)

    def _compute_answer(self, query_id: int, what: Question | Command) -> Answer:
        """Compute an answer; where a strategy's code raises, the answer is an error and the engine goes on."""
        made = monotonic()
        try:
            return Answer(query_id, self._compute_body(what), created_at=made)
        except RequestError as error:
            return Answer(query_id, b"", error.to_message(), made)
        except Exception:
            log.exception("no answer to %s", what if isinstance(what, str) else type(what).__name__)
            failed = Failed("", 500, "the engine failed to answer; the server's log has the cause")
            return Answer(query_id, b"", failed, made)

    def _compute_body(self, what: Question | Command) -> bytes:
        match what:
            case "kv_cache":
                described = {"data": describe_caches(self._engine), "memory": describe_memory(self._core.arena)}
                return msgspec.json.encode({"object": "list"} | described)
            case "settings":
                return msgspec.json.encode(self._about.settings)
            case "metrics":
                return self._observer.snapshot(read_engine_state(self._core, self._processes.read_resident_bytes()))
        return msgspec.json.encode(run_command(self._core, what))

    def _send(self, events: Sequence[Event]) -> None:
        by_worker: dict[int, list[FromEngine]] = defaultdict(list)
        for worker, message in events:
            by_worker[worker].append(message)
        for worker, messages in by_worker.items():
            self._gateway.send(worker, messages)
