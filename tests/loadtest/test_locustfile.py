"""The load test against a stub, in a process of its own: locust replaces the standard library's sockets."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from tests.loadtest.stub_server import PROMPT_TOKENS, TOKENS, StubServer, running_stub
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(not find_spec("locust"), reason="the extra `load` is not installed")

Seen = list[tuple[str, dict[str, Any]]]
Rows = dict[tuple[str, str], Any]
STRATEGIES = ("tiny", "tiny:paged", "tiny:window")


class Load:
    """A run of locust with a few clients. `end` returns exit code, statistics by (kind, name), and the log."""

    def __init__(self, url: str, *options: str, users: int = 2) -> None:
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json"]
        command += ["--only-summary", "--users", str(users), "--spawn-rate", "100", "--host", url, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, Rows, str]:
        printed, log = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, {(row["method"], row["name"]): row for row in json.loads(printed)}, log


def load(
    stub: StubServer, *options: str, users: int = 2, enough: Callable[[Seen], bool] = lambda seen: len(seen) >= 20
) -> tuple[int, Rows, str]:
    """Wait until the stub has had enough requests."""
    running = Load(stub.url, *options, users=users)
    assert stub.wait_until(enough), stub.seen
    running.process.send_signal(signal.SIGTERM)
    return running.end()


def test_times_are_reported_by_strategy() -> None:
    with running_stub(*STRATEGIES) as stub:
        code, rows, log = load(stub, "Completion", "--prompt-words", "7", "--api-key", "mine")
    assert code == 0, log
    for model in ("tiny:paged", "tiny:window"):
        requests = rows["POST", model]["num_requests"]
        assert requests > 0
        assert rows["TTFT", model]["num_requests"] == requests
        assert rows["tok/s", model]["num_requests"] == requests
        assert rows["ITL", model]["num_requests"] == requests * (TOKENS - 1)
        assert rows["POST", model]["total_content_length"] == requests * TOKENS
        assert rows["TTFT", model]["total_content_length"] == requests * PROMPT_TOKENS
    assert {path for path, _ in stub.seen} == {"/v1/completions"}
    assert {body["model"] for body in stub.bodies} == {"tiny:paged", "tiny:window"}
    assert {len(body["prompt"].split()) for body in stub.bodies} == {7}
    assert all(body["stream"] and body["temperature"] == 0 and body["max_tokens"] == 64 for body in stub.bodies)


def test_failures_are_failures() -> None:
    broken = ("busy", "failing", "breaking", "odd")
    with running_stub(*broken) as stub:
        code, rows, log = load(stub, "Completion", "--models", ",".join(broken), enough=all_of(broken))
    assert code == 1
    for model in broken:
        assert rows["POST", model]["num_failures"] == rows["POST", model]["num_requests"] > 0
        assert ("TTFT", model) not in rows
    assert "HTTP 429: too many requests wait" in log
    assert "error in the stream: the engine is gone" in log
    assert "Expected `int | null`, got `str`" in log
    assert "Traceback" not in log


def all_of(models: Sequence[str]) -> Callable[[Seen], bool]:
    return lambda seen: len(seen) > 20 and {body["model"] for _, body in seen} == set(models)


def test_no_such_strategy() -> None:
    with running_stub(*STRATEGIES) as stub:
        code, rows, log = Load(stub.url, "--strategies", "pagd", "--stop-timeout", "60").end()
    assert code == 1
    assert "there is no strategy 'pagd'; there are paged, window" in log
    assert "Traceback" not in log
    assert not [row for row in rows if row[0] == "POST"]


def test_no_server() -> None:
    with StubServer([]) as stub:
        url = stub.url
    code, rows, _ = Load(url).end()
    assert code == 1
    assert rows["GET", "/v1/models"]["num_failures"] > 0


def test_every_kind_of_user_does_what_it_is_for() -> None:
    with running_stub("tiny", "tiny:slow", "tiny:other") as stub:
        options = ("--strategies", "slow=1,other=0", "--prompt-words", "6")
        code, rows, log = load(stub, *options, users=7, enough=every_kind)
    assert code == 0, log
    assert {body["model"] for body in stub.bodies} == {"tiny:slow"}
    for kind in ("POST", "CANCEL", "TTFT", "tok/s"):
        assert rows[kind, "tiny:slow"]["num_requests"] > 0
    assert rows["CANCEL", "tiny:slow"]["num_failures"] == 0
    assert stub.hung_up > 0
    for messages in chats(stub.seen):
        said = [each["content"] for each in messages if each["role"] == "assistant"]
        assert len(messages) == 2 * len(said) + 1 <= 7
        assert said == [" word\u2028" * TOKENS] * len(said)


def every_kind(seen: Seen) -> bool:
    return len(seen) > 40 and {1, 3, 5} <= {len(messages) for messages in chats(seen)}


def chats(seen: Seen) -> list[list[dict[str, str]]]:
    return [body["messages"] for path, body in seen if path == "/v1/chat/completions"]


def test_strategies_that_make_no_sense() -> None:
    with running_stub(*STRATEGIES) as stub:
        code, _, log = Load(stub.url, "--strategies", "paged=-1").end()
    assert code == 1
    assert "cannot choose a model: weights have to be 0 or more" in log
