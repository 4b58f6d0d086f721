"""A real server is profiled while it answers, over HTTP and by `kvmux profile --url`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.cli.main import main
from tests.end_to_end.server_process import PATIENCE, Server, serving

TOKEN = "an operator's token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "kvmux.toml"
    config.write_text(f'admin_token = "{TOKEN}"\ndtype = "float32"\nthreads = 1\nkv_memory = "64MiB"\n')
    with serving("--config", str(config)) as running:
        yield running


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMUX_ADMIN_TOKEN", TOKEN)


def answer(server: Server) -> str:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return str(server.complete(**body).json()["choices"][0]["text"])


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Somebody asks all the time, and is answered as if nothing was recorded."""
    expected, over = answer(server), threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert answer(server) == expected

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        asking.result()


def profile(server: Server, **body: float) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/profile", json=body, headers=HEADERS, timeout=2 * PATIENCE)


def test_steps_are_recorded_while_requests_are_answered(server: Server) -> None:
    engine = server.engine.pid
    with busy(server):
        told = profile(server, steps=20, seconds=60)
    assert told.status_code == 200, told.text
    trace = told.json()
    assert trace["kvmux"]["steps"] == 20
    assert sum(event.get("name") == "step" and event["ph"] == "X" for event in trace["traceEvents"]) == 20
    assert {row["name"] for row in trace["kvmux"]["table"]} >= {"step"}
    assert server.engine.pid == engine


def test_there_is_one_at_a_time(server: Server) -> None:
    """Nobody asks for anything, so a recording takes all its time, in which the other one comes."""
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: profile(server, seconds=4), range(2)))
    assert sorted(each.status_code for each in answers) == [200, 409]
    refused = max(answers, key=lambda each: each.status_code)
    assert refused.json()["error"]["code"] == "profile_running"
    assert refused.headers["x-should-retry"] == "false"


def test_the_command_writes_the_trace_and_prints_the_table(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.json"
    with busy(server):
        code = main(["profile", "--url", server.url, "--steps", "10", "--seconds", "60", "--trace", str(file)])
    printed = capsys.readouterr().out
    assert code == 0
    assert re.search(r"10 steps in .* s, tiny", printed)
    assert re.search(r"\| step +\| +user_annotation \| +10 \|", printed)
    assert json.loads(file.read_text())["kvmux"]["steps"] == 10


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "201"], "steps: should be 200 or less"),
        (["--context", "20", "--model", "x"], "--context, --model: a running server has its own"),
        (["--trace", "nowhere/at/all.json"], "there is no folder nowhere/at"),
        (["--admin-token", "another secret"], "the token that was sent is wrong: send the admin token"),
    ],
)
def test_the_command_tells_what_is_wrong(
    server: Server, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = [] if "--trace" in arguments else ["--trace", str(tmp_path / "it.json")]
    assert main(["profile", "--url", server.url, *arguments, *trace]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a file without a trace"


def test_without_a_server_or_a_token_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["profile", "--url", "http://127.0.0.1:9", "--trace", str(tmp_path / "it.json")]
    assert main(command) == 2
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("KVMUX_ADMIN_TOKEN")
    assert main(command) == 2
    assert "give the server's admin token" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b'{"ok": 1}', b"[]", b"<html>"])
def test_an_answer_that_is_no_trace_leaves_the_older_one(
    answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200, content=answer))
    trace = tmp_path / "it.json"
    trace.write_text("an older trace")
    assert main(["profile", "--url", "http://127.0.0.1:9", "--trace", str(trace)]) == 2
    assert "is it kvmux?" in capsys.readouterr().err
    assert trace.read_text() == "an older trace"
