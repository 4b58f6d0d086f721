"""The engine killed under load: errors for those who wait, 503 meanwhile, and service again without a hand."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx

from tests.server.running import PATIENCE, Server, eventually, serving

BODY = {"model": "tiny", "prompt": "Long ago", "max_tokens": 2000, "ignore_eos": True}


def test_the_engine_killed_under_load_comes_back() -> None:
    with serving("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB") as server:
        started = Barrier(5)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_stream_until_error, server, started) for _ in range(4)]
            started.wait(PATIENCE)
            server.engine.kill()
            eventually(lambda: server.get("/ready").status_code == 503)
            assert server.get("/health").status_code == 200
            for stream in streams:
                assert stream.result(PATIENCE)["type"] == "server_error"
        eventually(lambda: server.get("/ready").status_code == 200)
        answer = server.complete(prompt="Long ago", max_tokens=3)
        assert answer.status_code == 200
        assert server.metric("kvmux_num_requests_running") == 0
        assert server.metric("kvmux_engine_restarts_total") == 1
        assert server.metric("kvmux_http_responses_total", code="503") >= 1, "told when there is an engine again"


def test_sigterm_tells_those_who_do_not_end_in_time() -> None:
    """As the whole server stops: the supervisor gives the worker the time, and the worker uses it."""
    with serving("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--drain-seconds", "1") as server:
        started = Barrier(2)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(_stream_until_error, server, started)
            started.wait(PATIENCE)
            server.process.terminate()
            assert stream.result(PATIENCE)["code"] == "server_stopping"
        assert server.process.wait(PATIENCE) == 0


def _stream_until_error(server: Server, started: Barrier) -> dict[str, str]:
    """The error event that a stream ends with."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=PATIENCE) as answer:
        for i, line in enumerate(answer.iter_lines()):
            if i == 0:
                started.wait(PATIENCE)
            if '"error"' in line:
                return dict(json.loads(line.removeprefix("data: "))["error"])
    raise AssertionError("the stream ended without an error")
