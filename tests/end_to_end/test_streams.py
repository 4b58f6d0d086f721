"""Many streams of one server: some are left in the middle, some when the server is told to stop; none loses a token."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import httpx
import pytest

from server.processes.supervisor import Targets
from tests.api.raw_http import raw_post
from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving

PROMPT = "Once upon a time there was a"
BODY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
STRATEGIES = ("contiguous", "paged", "sliding_window")


def pieces(server: Server, **body: object) -> Iterator[str]:
    """Texts as they come; closing the iterator hangs up."""
    url, ask = f"{server.url}/v1/completions", {"model": server.model} | BODY | body
    with httpx.stream("POST", url, json=ask, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["text"]


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--max-num-seqs", "3")
    with serving(*flags, targets=Targets("tests.end_to_end.checked_engine:run_slowly")) as server:
        yield server


def test_50_streams_of_which_many_are_left(tiny: Server) -> None:
    draw = random.Random(0)
    plans = [(draw.choice(STRATEGIES), draw.choice([1, 3, 10, 30, None])) for _ in range(50)]
    whole = {
        strategy: tiny.complete(**(BODY | {"stream": False, "kv_cache": strategy, "max_tokens": 60})).json()
        for strategy in STRATEGIES
    }
    now = tiny.metrics()
    before = {
        outcome: metric(now, "kvmux_requests_total", outcome=outcome) for outcome in ("length", "cancelled", "error")
    }

    def read(plan: tuple[str, int | None]) -> str:
        strategy, leave_after = plan
        stream = pieces(tiny, kv_cache=strategy, max_tokens=60 if leave_after is None else 1500)
        text = ""
        for i, piece in enumerate(stream, 1):
            text += piece
            if i == leave_after:
                break
        stream.close()  # type: ignore[attr-defined]
        return text

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(read, plans))
    for (strategy, leave_after), text in zip(plans, texts, strict=True):
        expected = whole[strategy]["choices"][0]["text"]
        assert (text == expected) if leave_after is None else expected.startswith(text)
    left = sum(leave_after is not None for _, leave_after in plans)
    eventually(lambda: tiny.metric("kvmux_requests_total", outcome="cancelled") == before["cancelled"] + left)
    now = tiny.metrics()
    assert metric(now, "kvmux_num_requests_running") == metric(now, "kvmux_num_requests_waiting") == 0
    assert metric(now, "kvmux_requests_total", outcome="length") == before["length"] + len(plans) - left
    assert metric(now, "kvmux_requests_total", outcome="error") == before["error"]
    usages = tiny.usages()
    assert [usages[strategy]["used"] for strategy in STRATEGIES] == [0] * len(STRATEGIES)


def count_requests(server: Server) -> tuple[float, float]:
    """Return how many requests run and wait, now."""
    now = server.metrics()
    return metric(now, "kvmux_num_requests_running"), metric(now, "kvmux_num_requests_waiting")


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_hangs_up_is_gone_within_two_steps(slow: Server, stream: bool) -> None:
    """Three that run, and two that wait for a place."""
    body = json.dumps({"model": slow.model} | BODY | {"max_tokens": 1500, "stream": stream}).encode()
    address = httpx.URL(slow.url)
    with ExitStack() as clients:
        for _ in range(5):
            client = clients.enter_context(socket.create_connection((address.host, address.port)))
            client.sendall(raw_post(body))
        eventually(lambda: count_requests(slow) == (3, 2))
    steps = slow.metric("kvmux_steps_total")  # once all have hung up, however long that took
    eventually(lambda: count_requests(slow) == (0, 0))
    assert slow.metric("kvmux_steps_total") <= steps + 2
    assert slow.usage("paged")["used"] == 0


def test_sigterm_lets_running_streams_end() -> None:
    with serving("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--drain-seconds", "60") as server:
        expected = "".join(pieces(server, max_tokens=200))
        begun = Barrier(5)

        def read(_: int) -> str:
            text = ""
            for i, piece in enumerate(pieces(server, max_tokens=200)):
                if i == 0:
                    begun.wait(PATIENCE)
                text += piece
            return text

        with ThreadPoolExecutor(4) as pool:
            texts = [pool.submit(read, i) for i in range(4)]
            begun.wait(PATIENCE)
            server.process.terminate()
            assert [text.result(PATIENCE) for text in texts] == [expected] * 4
        server.process.wait(PATIENCE)
