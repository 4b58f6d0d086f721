"""Steps of a running engine are recorded; requests are answered as ever, whatever becomes of the recording."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kernels.tracing import NULL_CONTEXT
from server.engine.ipc.messages import Answer, FromEngine, Profile, Query, SamplingParams, Submit, Tokens
from server.engine.ipc.server import WorkerDisconnected
from server.engine.loop import Loop
from server.engine.profiling import profiler
from server.metrics.registry import Metrics
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.test_loop import FakeEngineServer, tokens_of

LONG = 60.0  # seconds
PROMPT = random_prompt(9)
MOST = 40  # tokens of an answer


class Running:
    """A loop over an engine that is never idle: a request that has ended comes again."""

    def __init__(self, driver: Driver, reference: Reference) -> None:
        self.server = FakeEngineServer()
        self.loop = Loop(driver.engine, self.server, Metrics)  # type: ignore[arg-type]
        self._expected = reference.greedy(PROMPT, MOST)
        self._requests = 0

    def ask(self, *queries: Query) -> dict[int, Answer]:
        """Return the answers, by query; requests that end meanwhile have been answered rightly."""
        wanted = {query.query_id for query in queries}
        answers: dict[int, Answer] = {}

        def hear(_: int, message: FromEngine) -> None:
            if isinstance(message, Answer):
                answers[message.query_id] = message
                if answers.keys() >= wanted:
                    self.loop.stop()
            elif isinstance(message, Tokens) and message.finish_reason:
                assert tokens_of(self.server.heard[0], message.request_id) == self._expected
                self._submit()

        self.server.on_message = hear
        for query in queries:
            self.server.inbox.put((0, query))
        self._submit()
        self.loop._stopping = False
        self.loop.run()
        return answers

    def _submit(self) -> None:
        self._requests += 1
        sampling = SamplingParams(MOST, temperature=0.0, ignore_eos=True)
        self.server.inbox.put((0, Submit(str(self._requests), PROMPT, sampling)))


@pytest.fixture
def running(tiny: Path, reference: Reference) -> Running:
    return Running(Driver(tiny), reference)


def told(answer: Answer) -> Any:
    assert answer.error is None, answer.error
    return json.loads(gzip.decompress(answer.body))


def test_so_many_steps_are_recorded(running: Running) -> None:
    trace = told(running.ask(Query(1, Profile(12, LONG)))[1])
    steps = [event for event in trace["traceEvents"] if event.get("name") == "step" and event["ph"] == "X"]
    about = trace["kvmux"]
    assert (len(steps), about["steps"]) == (12, 12)
    assert 0 < about["seconds"] < LONG
    assert about["device"] == "cpu"
    rows = {row["name"]: row for row in about["table"]}
    assert rows["step"]["calls"] == 12
    assert rows["step"]["seconds"] == pytest.approx(sum(event["dur"] for event in steps) / 1e6)
    assert rows["step"]["own_seconds"] < rows["step"]["seconds"]
    assert rows.keys() & {"attend", "forward_layers"}
    for part in ("schedule", "plan", "forward", "sample_and_verify"):
        assert rows[part]["calls"] == 12


def test_nothing_is_traced_after_the_recording(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny)
    running = Running(driver, reference)
    running.ask(Query(1, Profile(3, LONG)))
    assert not driver.core.tracer.recorders
    assert running.loop._profiler.annotate_step(True) is NULL_CONTEXT


def test_one_at_a_time(running: Running) -> None:
    answers = running.ask(Query(1, Profile(5, LONG)), Query(2, Profile(5, LONG)))
    assert told(answers[1])["kvmux"]["steps"] == 5
    refused = answers[2].error
    assert refused is not None
    assert (refused.status, refused.code) == (409, "profile_running")
    assert told(running.ask(Query(3, Profile(2, LONG)))[3])["kvmux"]["steps"] == 2


def test_time_is_a_bound_too_and_an_idle_engine_records_nothing(tiny: Path) -> None:
    server = FakeEngineServer((0, Query(1, Profile(5, 0.05))))
    loop = Loop(Driver(tiny).engine, server, Metrics)  # type: ignore[arg-type]
    server.on_message = lambda *_: loop.stop()
    loop.run()
    (answer,) = server.heard[0]
    assert isinstance(answer, Answer)
    assert told(answer)["kvmux"]["steps"] == 0


def test_a_worker_that_has_gone_leaves_nothing_behind(running: Running) -> None:
    running.server.inbox.put((5, Query(1, Profile(3, LONG))))
    running.server.inbox.put((5, WorkerDisconnected()))
    running.ask(Query(2, "kv_cache"))
    while running.loop._profiler._busy:
        running.ask(Query(3, "kv_cache"))
    assert told(running.ask(Query(4, Profile(2, LONG)))[4])["kvmux"]["steps"] == 2


class Broken:
    """A profiler that fails where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _do(self, what: str) -> None:
        if what == self._where:
            raise RuntimeError("broken on purpose")

    def __call__(self, **_: Any) -> Broken:
        self._do("make")
        return self

    def __enter__(self) -> Broken:
        self._do("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._do("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._do("export")
        Path(path).write_text("no trace" if self._where == "garbage" else '{"traceEvents": []}')


@pytest.mark.parametrize("where", ["make", "start", "stop", "export", "garbage"])
def test_a_fault_of_the_profiler_ends_no_request(running: Running, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "profile", Broken(where))
        refused = running.ask(Query(1, Profile(3, LONG)))[1].error
    assert refused is not None
    assert (refused.status, refused.message) == (500, profiler.FAILED_MESSAGE)
    assert told(running.ask(Query(2, Profile(2, LONG)))[2])["kvmux"]["steps"] == 2


def test_a_trace_that_is_too_large_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_TRACE_BYTES", 1000)
    refused = running.ask(Query(1, Profile(3, LONG)))[1].error
    assert refused is not None
    assert (refused.status, refused.code) == (409, "too_large")
    assert "ask for fewer steps" in refused.message
