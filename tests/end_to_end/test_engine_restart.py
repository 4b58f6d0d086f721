"""The engine killed or stopped under load: errors for those who wait, 503 meanwhile, service again without a hand."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import psutil
import pytest

from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving

BODY = {"model": "tiny", "prompt": "Long ago", "max_tokens": 2000, "ignore_eos": True}


def test_the_engine_killed_under_load_comes_back() -> None:
    with serving("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", anew=True) as server:
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
        now = server.metrics()
        assert metric(now, "kvmux_num_requests_running") == 0
        assert metric(now, "kvmux_engine_restarts_total") == 1
        assert metric(now, "kvmux_http_responses_total", code="503") >= 1, "told when there is an engine again"


def test_a_stopped_engine_is_noticed_and_replaced() -> None:
    """Those that it serves and those that wait get an error; a stop that is short is nothing to them."""
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--watchdog-timeout", "5")
    with serving(*flags, "--max-num-seqs", "2") as server:
        engine, started = server.engine, Barrier(3)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_stream_until_error, server, started) for _ in range(2)]
            started.wait(PATIENCE)
            waiting = [pool.submit(server.complete, **BODY) for _ in range(2)]
            engine.suspend()
            eventually(lambda: engine.status() == psutil.STATUS_STOPPED)
            engine.resume()
            eventually(lambda: server.metric("kvmux_num_requests_waiting") == 2)
            assert not any(each.done() for each in (*streams, *waiting))
            engine.suspend()
            eventually(lambda: server.get("/ready").status_code == 503)
            assert int(server.get("/ready").headers["retry-after"]) >= 1
            for stream in streams:
                assert stream.result(PATIENCE)["code"] == "engine_unavailable"
            for answer in waiting:
                assert answer.result(PATIENCE).json()["error"]["code"] == "engine_unavailable"
        eventually(lambda: server.get("/ready").status_code == 200)
        assert server.complete(prompt="Long ago", max_tokens=3).status_code == 200
        assert server.metric("kvmux_engine_restarts_total") == 1
        assert "it was stopped, by SIGSTOP" in server.output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_loses_no_request(number: signal.Signals) -> None:
    """As systemd sends it: every process gets it, and those below the supervisor first."""
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--drain-seconds", "3600")
    is_own_child = number == signal.SIGTERM
    with serving(*flags, "--workers", "2", anew=is_own_child) as server, ThreadPoolExecutor(4) as pool:
        started = Barrier(5)
        streams = [pool.submit(_count_streamed_tokens, server, started) for _ in range(4)]
        started.wait(PATIENCE)
        for process in (*server.process.children(recursive=True), server.process):
            process.send_signal(number)
        assert [stream.result() for stream in streams] == [500] * 4
        assert server.process.wait(PATIENCE) == (0 if is_own_child else None)


def _count_streamed_tokens(server: Server, started: Barrier) -> int:
    """Stream 500 tokens, from the first of which on `started` is waited for; return how many arrived."""
    body = BODY | {"max_tokens": 500, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = filter(None, answer.iter_lines())
        next(lines)
        started.wait(PATIENCE)
        *_, usage, done = lines
    assert done == "data: [DONE]"
    return int(json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"])


def test_metrics_on_a_port_of_their_own_behind_a_key() -> None:
    """Both processes serve both ports."""
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--workers", "2")
    with serving(*flags, "--metrics-port", "0", "--metrics-key", "let me see") as server:
        found = re.search(r"metrics are on (http://\S+)/metrics", server.output.read_text())
        assert found
        key = {"authorization": "Bearer let me see"}
        for _ in range(8):  # new connections, which either process may take
            for url, path, headers, status in (
                (found[1], "/metrics", key, 200),
                (found[1], "/metrics", {}, 401),
                (found[1], "/ready", {}, 200),
                (found[1], "/v1/models", {}, 404),
                (server.url, "/metrics", key, 404),
                (server.url, "/v1/models", {}, 200),
                (server.url, "/health", {}, 200),
            ):
                assert httpx.get(url + path, headers=headers, timeout=PATIENCE).status_code == status, (url, path)
        text = httpx.get(f"{found[1]}/metrics", headers=key, timeout=PATIENCE).text
        assert metric(text, "kvmux_num_requests_running") == 0
        assert "let me see" not in server.output.read_text() + text + server.get("/v1/settings").text


def test_sigterm_tells_those_who_do_not_end_in_time() -> None:
    """As the whole server stops: the supervisor gives the worker the time, and the worker uses it."""
    with serving(
        "--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB", "--drain-seconds", "1", anew=True
    ) as server:
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
