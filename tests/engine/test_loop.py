"""The engine's loop handles its workers' requests, cancellations and queries, and reports why it cannot start."""

from __future__ import annotations

import json
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from config.settings import Settings
from server.engine import loop as loop_module
from server.engine.ipc.messages import (
    Admitted,
    Answer,
    Cancel,
    Clear,
    DescribeBlock,
    Failed,
    FromEngine,
    Inspect,
    Query,
    Question,
    SamplingParams,
    Submit,
    ToEngine,
    Tokens,
)
from server.engine.ipc.server import WorkerDisconnected
from server.engine.loop import Loop
from server.metrics.exposition import Renderer
from server.metrics.registry import Metrics
from server.processes import engine as engine_process
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt


class FakeEngineServer:
    """A server whose workers send all messages at once, and receive events until `enough`."""

    def __init__(self, *said: tuple[int, ToEngine | WorkerDisconnected]) -> None:
        self.inbox: queue.Queue[tuple[int, ToEngine | WorkerDisconnected]] = queue.Queue()
        self.heard: dict[int, list[FromEngine]] = {}
        self.batches: list[tuple[int, int]] = []
        self.on_message: Callable[[int, FromEngine], None] = lambda *_: None
        for message in said:
            self.inbox.put(message)

    def send(self, worker: int, messages: Sequence[FromEngine]) -> None:
        self.batches.append((worker, len(messages)))
        for message in messages:
            self.heard.setdefault(worker, []).append(message)
            self.on_message(worker, message)


def greedy(name: str, prompt: list[int], count: int = 4, **options: Any) -> Submit:
    return Submit(name, prompt, SamplingParams(count, temperature=0.0, ignore_eos=True), **options)


def run_until(driver: Driver, server: FakeEngineServer, ends: int) -> None:
    """Run the loop until a number of requests have ended."""
    loop, left = Loop(driver.engine, server, Metrics), [ends]  # type: ignore[arg-type]

    def count(_: int, message: FromEngine) -> None:
        left[0] -= isinstance(message, Failed) or (isinstance(message, Tokens) and message.finish_reason is not None)
        if not left[0]:
            loop.stop()

    server.on_message = count
    loop.run()


def tokens_of(messages: Sequence[FromEngine], name: str) -> list[int]:
    return [token for m in messages if isinstance(m, Tokens) and m.request_id == name for token in m.tokens]


def test_each_worker_hears_of_its_own_requests(tiny: Path, reference: Reference) -> None:
    prompts = [random_prompt(n) for n in (5, 9)]
    server = FakeEngineServer((0, greedy("same", prompts[0])), (1, greedy("same", prompts[1], kv_cache="contiguous")))
    run_until(Driver(tiny), server, ends=2)
    for worker, prompt in enumerate(prompts):
        assert isinstance(server.heard[worker][0], Admitted)
        assert tokens_of(server.heard[worker], "same") == reference.greedy(prompt, 4)
    assert (0, 2) in server.batches, "what a step brings one worker goes out in one piece"


def test_a_refusal_is_an_answer(tiny: Path) -> None:
    server = FakeEngineServer((3, greedy("r", [5] * 600)))
    run_until(Driver(tiny), server, ends=1)
    (failed,) = server.heard[3]
    assert isinstance(failed, Failed)
    assert failed.status == 400


def test_cancelled_requests_and_those_of_gone_workers_are_heard_of_no_more(tiny: Path) -> None:
    prompt = random_prompt(9)
    server = FakeEngineServer(
        (0, greedy("stays", prompt)), (0, greedy("leaves", prompt)), (1, greedy("leaves", prompt)),
        (1, WorkerDisconnected()), (0, Cancel("leaves")), (0, Cancel("unknown")), (2, WorkerDisconnected()),
    )  # fmt: skip
    driver = Driver(tiny)
    run_until(driver, server, ends=1)
    assert list(server.heard) == [0]
    assert {m.request_id for m in server.heard[0] if isinstance(m, Tokens)} == {"stays"}
    driver.assert_nothing_leaked()


def test_queries_are_answered_between_steps(tiny: Path) -> None:
    server = FakeEngineServer((0, Query(7, "kv_cache")), (0, Query(8, "metrics")), (0, greedy("r", random_prompt(9))))
    run_until(Driver(tiny), server, ends=1)
    answers = {m.query_id: m.body for m in server.heard[0] if isinstance(m, Answer)}
    described = json.loads(answers[7])
    assert [told["name"] for told in described["data"]] == ["paged", "contiguous", "sliding_window"]
    text = Renderer().render(answers[8], openmetrics=False)
    assert b'kvmux_num_requests_running{strategy="paged"} 0.0' in text


def test_the_metrics_count_what_the_loop_did(tiny: Path) -> None:
    server = FakeEngineServer((0, greedy("r", random_prompt(9))))
    loop = Loop(Driver(tiny).engine, server, Metrics)  # type: ignore[arg-type]

    def ask_then_stop(_: int, message: FromEngine) -> None:
        if isinstance(message, Tokens) and message.finish_reason:
            server.inbox.put((0, Query(1, "metrics")))
        elif isinstance(message, Answer):
            loop.stop()

    server.on_message = ask_then_stop
    loop.run()
    answer = server.heard[0][-1]
    assert isinstance(answer, Answer)
    text = Renderer().render(answer.body, openmetrics=False)
    assert b'kvmux_requests_total{outcome="length",strategy="paged"} 1.0' in text
    assert b'kvmux_generation_tokens_total{strategy="paged"} 4.0' in text


def test_many_who_ask_often_cost_one_look_in_each_second(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered from a cache for a second, errors too; a command that changes something clears it."""
    looks, now = Counter[str](), [100.0]
    for name in ("read_engine_state", "describe_caches", "describe_prefixes"):
        look = getattr(loop_module, name)
        monkeypatch.setattr(
            loop_module, name, lambda *given, name=name, look=look: looks.update([name]) or look(*given)
        )
    monkeypatch.setattr(loop_module, "monotonic", lambda: now[0])
    questions: tuple[Question, ...] = ("metrics", "kv_cache")
    asked = [(worker, Query(n, what)) for worker in range(3) for n in range(20) for what in questions]
    server = FakeEngineServer(*asked)
    loop = Loop(Driver(tiny).engine, server, Metrics)  # type: ignore[arg-type]

    def ask(*queries: Query) -> list[Answer]:
        """Return the loop's answers to these queries, after those that were sent before."""
        server.heard.clear()
        for query in queries:
            server.inbox.put((0, query))

        def stop_at_last(_: int, message: FromEngine) -> None:
            if isinstance(message, Answer) and message.query_id == queries[-1].query_id:
                loop.stop()

        server.on_message = stop_at_last
        loop._stopping = False
        loop.run()
        return [message for message in server.heard[0] if isinstance(message, Answer)]

    first = ask(Query(99, "metrics"))
    assert looks == {"read_engine_state": 1, "describe_caches": 1}
    assert {answer.created_at for answer in first} == {100.0}
    now[0] += 0.9
    ask(*(Query(2 * n + i, what) for n in range(10) for i, what in enumerate(questions)))
    assert looks == {"read_engine_state": 1, "describe_caches": 1}
    now[0] += 0.1
    ask(*(Query(2 * n + i, what) for n in range(10) for i, what in enumerate(questions)))
    assert looks == {"read_engine_state": 2, "describe_caches": 2}
    ask(Query(1, "prefixes"), Query(2, Inspect("paged")), Query(3, DescribeBlock("paged", 0, 0)), Query(4, "kv_cache"))
    now[0] += 0.95
    *_, last = ask(Query(1, "prefixes"), Query(2, "kv_cache"))
    assert looks == {"read_engine_state": 2, "describe_caches": 2, "describe_prefixes": 1}, "commands that only read"
    *_, last = ask(Query(1, "kv_cache"), Query(2, Clear("paged", None)), Query(3, "kv_cache"), Query(4, "prefixes"))
    assert (looks["describe_caches"], looks["describe_prefixes"]) == (3, 2)
    assert last.query_id == 4
    now[0] += 1.95
    ask(Query(1, "prefixes"))
    assert looks["describe_prefixes"] == 2, "it is a large answer, and reused longer"


class Status:
    """A stand-in for the supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.calls, self.disabled = None, dict[str, str]()

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kv_memory": "1KiB"}, "kv_memory is 1KiB, too little"),
        ({"kv_memory": "900TiB"}, "kv_memory is 900TiB, but only"),
        ({"max_seq_len": 100_000}, "but the model has 512 positions"),
        ({"model": "nowhere"}, "no model at 'nowhere'"),
        ({"strategies": {"paged": {"kind": "paged", "blocks": 3}}}, "strategies.paged.blocks"),
    ],
)
def test_what_the_user_must_change_is_told_instead_of_a_traceback(
    tiny: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    status = Status()
    given = Settings(**({"model": str(tiny), "dtype": "float32"} | settings))
    engine_process.run(given, str(tmp_path / "socket"), status)  # type: ignore[arg-type]
    (told,) = status.told
    assert why in told["error"]


@pytest.mark.parametrize("question", ["metrics", "kv_cache"])
def test_a_strategy_that_cannot_tell_fails_the_question_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, question: Question
) -> None:
    driver = Driver(tiny)

    def broken(instance: object) -> None:
        raise ValueError("no idea")

    monkeypatch.setattr("server.engine.info.read_usage", broken)
    server = FakeEngineServer((0, Query(7, question)), (0, greedy("r", random_prompt(9))))
    run_until(driver, server, ends=1)
    (answer,) = [message for message in server.heard[0] if isinstance(message, Answer)]
    assert answer.error is not None
    assert answer.error.status == 500
    assert "no idea" in caplog.text


def test_books_that_do_not_add_up_end_an_idle_engine_if_they_are_checked(tiny: Path) -> None:
    server = FakeEngineServer((1, greedy("a", random_prompt(9), kv_cache="paged")))
    driver = Driver(tiny, check_integrity=True)
    run_until(driver, server, 1)
    driver.core.check_integrity()
    driver.core.memory.held_bytes += 1
    with pytest.raises(AssertionError):
        Loop(driver.engine, FakeEngineServer(), Metrics).run()  # type: ignore[arg-type]
