"""The load test against a stub, in a process of its own: locust replaces the standard library's sockets."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from tests.loadtest.stub import TOKENS, Stub

pytestmark = pytest.mark.skipif(not find_spec("locust"), reason="the extra `load` is not installed")


@contextmanager
def serving(*models: str) -> Iterator[Stub]:
    with Stub(list(models)) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()


class Load:
    """Locust with two clients. `end` gives exit code, statistics by (kind, name), and the log."""

    def __init__(self, url: str, *options: str) -> None:
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json"]
        command += ["--only-summary", "--users", "2", "--spawn-rate", "100", "--host", url, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, dict[tuple[str, str], Any], str]:
        printed, log = self.process.communicate(timeout=60)
        return self.process.returncode, {(row["method"], row["name"]): row for row in json.loads(printed)}, log


def load(stub: Stub, *options: str) -> tuple[int, dict[tuple[str, str], Any], str]:
    """Until the stub has had enough."""
    running = Load(stub.url, *options)
    assert stub.enough.wait(60)
    running.process.send_signal(signal.SIGTERM)
    return running.end()


def test_times_are_reported_by_strategy() -> None:
    with serving("tiny", "tiny:paged", "tiny:window") as stub:
        code, rows, log = load(stub, "--prompt-words", "3,5", "--shared-words", "4", "--body", '{"ignore_eos": true}')
    assert code == 0, log
    for model in ("tiny:paged", "tiny:window"):
        requests = rows["POST", model]["num_requests"]
        assert requests > 0
        assert rows["TTFT", model]["num_requests"] == requests
        assert rows["ITL", model]["num_requests"] == requests * (TOKENS - 1)
        assert rows["POST", model]["total_content_length"] == requests * TOKENS
        assert rows["TTFT", model]["total_content_length"] == requests * 7
    assert {body["model"] for body in stub.seen} == {"tiny:paged", "tiny:window"}
    assert {len(body["prompt"].split()) for body in stub.seen} == {7, 9}
    assert len({tuple(body["prompt"].split()[:4]) for body in stub.seen}) == 1
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in stub.seen)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("busy", "HTTP 429: too many requests wait"),
        ("failing", "error in the stream: the engine is gone"),
        ("breaking", ""),
    ],
)
def test_failures_are_failures(model: str, message: str) -> None:
    with serving() as stub:
        code, rows, log = load(stub, "--models", model)
    assert code == 1
    row = rows["POST", model]
    assert row["num_failures"] == row["num_requests"] > 0
    assert ("TTFT", model) not in rows
    assert message in log


def test_no_server() -> None:
    with Stub([]) as stub:
        url = stub.url
    code, rows, _ = Load(url).end()
    assert code == 1
    assert rows["GET", "/v1/models"]["num_failures"] > 0
