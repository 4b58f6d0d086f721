"""The engine's main loop, in one thread: handles the API workers' messages, computes a step, sends events.

Knows the socket's server and the core; nothing of HTTP or Prometheus.
"""

from __future__ import annotations

import logging
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import msgspec

from server.engine.admin import run_command
from server.engine.build import Engine
from server.engine.info import (
    ProcessMemory,
    describe_caches,
    describe_memory,
    make_engine_info,
    read_engine_state,
    summarize_engine,
)
from server.engine.ipc.answers import compute_answer
from server.engine.ipc.messages import (
    Answer,
    Cancel,
    Command,
    ControlRollout,
    FromEngine,
    Observed,
    Profile,
    Query,
    QueryPayload,
    Question,
    ReadingCommand,
    RolloutAnswer,
    SetSplits,
    StartRollout,
    Submit,
    ToEngine,
    get_answer_ttl,
)
from server.engine.ipc.server import EngineServer, WorkerDisconnected
from server.engine.live.prefixes import describe_prefixes
from server.engine.live.routing import describe_routing
from server.engine.live.state import describe_live
from server.engine.profiling.profiler import Profiler
from server.engine.results import Event
from server.engine.scheduling.request import RequestError
from server.records import ConstraintName, ConstraintRefusal, EngineInfo, EngineState, RequestRecord, StepReport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # maximum seconds that an idle engine waits for a message before it checks whether to stop
CONTROLLER_SECONDS = 5.0  # most seconds that an engine waits for the controller of roll-outs before it serves
CONTROLLER_PAUSE = 0.1  # seconds between two looks whether to stop meanwhile
STALLED_SECONDS = 0.001  # seconds of pause after a step in which no running request could be scheduled


class StepObserver(Protocol):
    """Collects the engine's metrics, for /metrics."""

    def observe(self, report: StepReport, finished: Sequence[RequestRecord]) -> None:
        """Record the metrics of a step, and of the requests that ended in it."""
        ...

    def observe_responses(self, responses: Mapping[int, int]) -> None:
        """Add an API worker's new HTTP responses to the metrics: their numbers by status."""
        ...

    def observe_constraints(
        self, constraints: Mapping[ConstraintName, int], refusals: Mapping[ConstraintRefusal, int]
    ) -> None:
        """Add an API worker's constrained requests to the metrics, and those that their constraints ended."""
        ...

    def snapshot(self, state: EngineState) -> bytes:
        """Return all metrics, with the engine's state as gauges, encoded for API workers."""
        ...

    def describe_totals(self) -> Mapping[str, Any]:
        """Return what was counted by instance since the engine's start, as JSON, for the live state."""
        ...


class Loop:
    """The engine's main loop: handles messages, computes a step and sends events until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        server: EngineServer,
        make_observer: Callable[[EngineInfo], StepObserver],
        restarts: int = 0,
        beat: Callable[[], None] = lambda: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the loop of a built engine; `make_observer` makes the collector of its metrics.

        `beat` is called once per iteration: a step, or a wait of up to IDLE_SECONDS. `on_step` is called after every
        step in which rows were computed.
        """
        self._engine = engine
        self._core = engine.core
        self._server = server
        self._beat = beat
        self._on_step = on_step
        self._info = make_engine_info(engine, restarts)
        self._observer = make_observer(self._info)
        self._processes = ProcessMemory()
        # Latest answer to each question of the API workers, reused until it expires
        self._answers: dict[Question, Answer] = {}
        self._profiler = Profiler(engine.core.tracer, engine.device.tensors, summarize_engine(engine))
        self._stopping = False

    def run(self) -> None:
        for message in self._wait_for_splits():
            self._send(self._handle(*message))
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
            computed = result.report.rows or result.report.shadow_tokens
            pause = 0.0 if computed else STALLED_SECONDS if self._core.busy else IDLE_SECONDS

    def stop(self) -> None:
        """Make run() return after the current iteration."""
        self._stopping = True

    def _wait_for_splits(self) -> list[tuple[int, ToEngine | WorkerDisconnected]]:
        """Wait until the controller of roll-outs, if there is one, has said how to divide requests.

        Return the messages that came meanwhile. If it says nothing for CONTROLLER_SECONDS, no request is divided yet.
        """
        early: list[tuple[int, ToEngine | WorkerDisconnected]] = []
        deadline = monotonic() + CONTROLLER_SECONDS
        while self._engine.rollouts.is_expected and monotonic() < deadline and not self._stopping:
            self._beat()
            for worker, message in self._receive_messages(CONTROLLER_PAUSE):
                if isinstance(message, SetSplits):
                    self._send(self._handle(worker, message))
                    return early
                early.append((worker, message))
        return early

    def _receive_messages(self, pause: float) -> Iterator[tuple[int, ToEngine | WorkerDisconnected]]:
        """Yield the received messages, each with its API worker; wait up to `pause` seconds for the first one."""
        try:
            yield self._server.inbox.get(block=pause > 0, timeout=pause or None)
            while True:
                yield self._server.inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, worker: int, message: ToEngine | WorkerDisconnected) -> Sequence[Event]:
        match message:
            case Submit():
                rejection = self._core.submit(worker, message)
                return [rejection] if rejection else []
            case Cancel(request_id, outcome):
                self._core.cancel(worker, request_id, outcome)
            case SetSplits():
                return self._engine.rollouts.set_splits(worker, message)
            case RolloutAnswer():
                return [self._engine.rollouts.answer(message)]
            case Query(query_id, payload):
                return self._handle_query(worker, query_id, payload)
            case Observed(responses, memory, constraints, refusals):
                self._observer.observe_responses(responses)
                self._observer.observe_constraints(constraints, refusals)
                self._processes.set_worker_memory(worker, memory)
            case WorkerDisconnected():
                self._core.cancel_worker(worker)
                self._engine.rollouts.forget(worker)
                self._processes.remove_worker(worker)
        return []

    def _handle_query(self, worker: int, query_id: int, payload: QueryPayload) -> Sequence[Event]:
        match payload:
            case Profile():
                busy = self._profiler.begin(worker, query_id, payload)
                return [Event(worker, busy)] if busy else []
            case "rollouts" | "fidelity" | StartRollout() | ControlRollout():
                try:
                    event = self._engine.rollouts.ask(worker, query_id, payload)
                except RequestError as error:
                    event = Event(worker, Answer(query_id, b"", error.to_message(), monotonic()))
                return [] if event is None else [event]
        return [Event(worker, self._answer(query_id, payload))]

    def _answer(self, query_id: int, payload: Question | Command) -> Answer:
        """Return the answer to a question or command. Answers to questions are reused until they expire."""
        if not isinstance(payload, str):
            if not isinstance(payload, ReadingCommand):
                self._answers.clear()  # kept answers are dropped: the command may change them
            return self._compute_answer(query_id, payload)
        cached = self._answers.get(payload)
        if cached is None or cached.created_at + get_answer_ttl(payload) <= monotonic():
            cached = self._answers[payload] = self._compute_answer(query_id, payload)
        return msgspec.structs.replace(cached, query_id=query_id)

    def _compute_answer(self, query_id: int, payload: Question | Command) -> Answer:
        return compute_answer(query_id, payload, monotonic(), lambda: self._compute_body(payload))

    def _compute_body(self, payload: Question | Command) -> bytes:
        match payload:
            case "kv_cache":
                body = {"data": describe_caches(self._engine), "memory": describe_memory(self._core.memory)}
                return msgspec.json.encode({"object": "list"} | body)
            case "settings":
                return msgspec.json.encode(self._info.settings)
            case "live":
                totals = self._observer.describe_totals()
                return msgspec.json.encode(describe_live(self._engine) | {"totals": totals})
            case "prefixes":
                return msgspec.json.encode(describe_prefixes(self._core))
            case "routing":
                return msgspec.msgpack.encode(describe_routing(self._core))
            case "metrics":
                return self._observer.snapshot(read_engine_state(self._engine, self._processes.read_resident_bytes()))
        return msgspec.json.encode(run_command(self._engine, payload))

    def _send(self, events: Sequence[Event]) -> None:
        by_worker: dict[int, list[FromEngine]] = defaultdict(list)
        for worker, message in events:
            by_worker[worker].append(message)
        for worker, messages in by_worker.items():
            self._server.send(worker, messages)
