"""The log's line of a request to a fake engine. With a real one: tests/end_to_end/test_logs_and_spans.py."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pythonjsonlogger.core import RESERVED_ATTRS

from server.api.openai.chat import ChatRequest
from server.api.openai.completions import CompletionRequest
from server.engine.ipc.messages import Admitted, Preempted, Submit, Tokens
from tests.api.conftest import ADMIN_TOKEN, Api, running_api
from tests.api.fake_engine import FakeEngine, fails, generates, silent
from tests.api.payloads import VALID_REQUEST, Encode
from tests.api.raw_http import connect, raw_post
from tests.patience import PATIENCE

MARK = "xylophone"

Line = Callable[[str], logging.LogRecord]


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Line:
    """The line of a request, which comes when the client has its answer already."""
    caplog.set_level(logging.INFO)

    def find(request_id: str) -> logging.LogRecord:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = [r for r in caplog.records if fields_of(r).get("request_id") == request_id]
            if found:
                (record,) = found
                return record
            time.sleep(0.005)
        raise AssertionError(f"no line of {request_id}: {caplog.text}")

    return find


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return what a record has beside the attributes of every record."""
    return {name: value for name, value in vars(record).items() if name not in RESERVED_ATTRS}


def ask(http: httpx.Client, request_id: str, **body: object) -> httpx.Response:
    return http.post("/v1/completions", json=VALID_REQUEST | body, headers={"x-request-id": request_id})


def test_the_engines_error_is_logged(engine: FakeEngine, http: httpx.Client, encode: Encode, line: Line) -> None:
    def script(submit: Submit) -> list[list[Any]]:
        name = submit.request_id
        admitted = Admitted(name, "paged", "rule 3", 1, "evicted", queue_seconds=0.25)
        return [[admitted], [Preempted(name)], [Preempted(name), Tokens(name, encode("hi"), "stop")]]

    engine.script = script
    assert ask(http, "result").status_code == 200
    result = fields_of(line("result"))
    known = {"strategy": "paged", "reason": "rule 3", "miss": "evicted", "cached_tokens": 1, "queue_ms": 250.0}
    known |= {"preemptions": 2, "outcome": "stop", "generated_tokens": 1, "prompt_tokens": 2, "status": 200}
    assert result | known == result
    assert "prompts" not in result
    assert "2 (1 cached) + 1 tokens" in line("result").getMessage()


def test_draft_tokens_are_logged_if_there_were_any(
    engine: FakeEngine, http: httpx.Client, encode: Encode, line: Line
) -> None:
    def script(submit: Submit) -> list[list[Any]]:
        name, tokens = submit.request_id, [token for letter in "hello" for token in encode(letter)]
        drafted = [Tokens(name, tokens[1:4], None, None, 4), Tokens(name, tokens[4:], "length", None, 1)]
        return [[Admitted(name, "paged", "default", 0), Tokens(name, tokens[:1])], drafted]

    engine.script = script
    assert ask(http, "guessed").status_code == 200
    result = fields_of(line("guessed"))
    assert (result["drafted_tokens"], result["accepted_tokens"], result["generated_tokens"]) == (5, 2, 5)
    engine.script = generates(encode("hello"))
    assert ask(http, "unguessed").status_code == 200
    assert "drafted_tokens" not in fields_of(line("unguessed"))


@pytest.mark.parametrize(("status", "level"), [(429, logging.INFO), (500, logging.ERROR), (503, logging.WARNING)])
def test_who_has_to_hear_of_it(engine: FakeEngine, http: httpx.Client, line: Line, status: int, level: int) -> None:
    engine.script = fails(status, "no luck", "some_code")
    name = f"failed-{status}"
    assert ask(http, name).status_code == status
    record = line(name)
    assert (record.levelno, record.exc_info) == (level, None)
    result = fields_of(record)
    assert (result["status"], result["code"], result["error"], result["outcome"]) == (
        status,
        "some_code",
        "no luck",
        "error",
    )


def test_a_stream_that_fails_had_a_good_status(
    engine: FakeEngine, http: httpx.Client, encode: Encode, line: Line
) -> None:
    engine.script = lambda submit: [*generates(encode("hi"), None)(submit), *fails(500, "out of luck")(submit)]
    assert ask(http, "streamed", stream=True).status_code == 200
    record = line("streamed")
    assert record.levelno == logging.ERROR
    assert fields_of(record) | {"status": 200, "outcome": "error", "error": "out of luck"} == fields_of(record)


def test_a_fault_within_a_stream_is_logged_once_with_its_traceback(
    engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, line: Line
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("server.api.openai.completions._make_choice", broken)
    assert '"error"' in ask(http, "faulty", stream=True).text
    exc_info = line("faulty").exc_info
    assert exc_info is not None
    assert exc_info[0] is ZeroDivisionError


def test_a_client_that_leaves_before_there_is_an_answer(api: Api, engine: FakeEngine, line: Line) -> None:
    engine.script = silent
    with connect(api.url, raw_post(json.dumps(VALID_REQUEST).encode(), "x-request-id: impatient")):
        engine.wait_for(Submit)
    result = fields_of(line("impatient"))
    assert (result["status"], result["outcome"]) == (499, "cancelled")
    assert "error" not in result


def test_polling_ready_does_not_fill_the_log(lone_api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert httpx.get(f"{lone_api.url}/ready", headers={"x-request-id": "polls"}, timeout=PATIENCE).status_code == 503
    assert httpx.get(f"{lone_api.url}/metrics", headers={"x-request-id": "asks"}, timeout=PATIENCE).status_code == 503
    logged = [fields_of(record) for record in caplog.records]
    assert [fields["request_id"] for fields in logged if "request_id" in fields] == ["asks"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_field_gets_into_the_log(
    engine: FakeEngine, http: httpx.Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Whatever is wrong with it."""
    caplog.set_level(logging.DEBUG)
    body = CompletionRequest if path == "/v1/completions" else ChatRequest
    message = {"role": "user", "content": "x"}
    good: dict[str, Any] = {"model": "tiny"} | (
        {"prompt": "x"} if body is CompletionRequest else {"messages": [message]}
    )
    wrong = (MARK, [MARK], {MARK: MARK}, [{"role": MARK, "content": [{MARK: MARK}], MARK: [MARK]}])
    # Instances are the engine's to refuse
    names = [name for name in (*body.model_fields, MARK) if name not in ("kv_cache", "kv_cache_reference")]
    asked = [good | {name: value} for name in names for value in wrong]
    statuses = [http.post(path, json=each, headers={"x-kv-cache": "paged"}).status_code for each in asked]
    assert statuses.count(400) > 100
    http.post(path, json=good, headers={"authorization": f"Bearer {MARK}"})
    result = [record for record in caplog.records if record.name.startswith("server.")]
    assert len(result) > 100
    for record in result:
        line = fields_of(record)
        line.pop("completion_id", None)  # the body's request_id is there to be found
        assert MARK not in f"{record.getMessage()} {line}"


@pytest.mark.parametrize(("known", "status"), [("/nowhere", 404), ("/v1/kv_cache/paged", 405)])
def test_a_path_cannot_begin_a_line(http: httpx.Client, line: Line, known: str, status: int) -> None:
    """The path is harmless as it was sent, quoted; in the message of an error it is not."""
    path, name = f"{known}%0aCRITICAL%1b%5b31m%C2%85%E2%80%A8", f"forged-{status}"
    headers = {"x-request-id": name, "authorization": f"Bearer {ADMIN_TOKEN}"}
    assert http.put(path, headers=headers).status_code == status
    assert path in line(name).getMessage()
    assert line(name).getMessage().isprintable()
    assert fields_of(line(name))["error"] == "there is no such route"


# ---------------------------------------------------------------- where prompts are wanted
@pytest.fixture(scope="module")
def telling(encode: Encode) -> Iterator[httpx.Client]:
    with (
        running_api(log_prompts=True) as api,
        FakeEngine(api.socket_path, generates(encode("hello world"))),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_texts_if_they_are_switched_on(telling: httpx.Client, line: Line, stream: bool) -> None:
    name = f"said-{stream}"
    assert ask(telling, name, prompt=["knock knock", "who"], stream=stream).status_code == 200
    result = fields_of(line(name))
    assert result["prompts"] == ["knock knock", "who"]
    assert result["texts"] == ["hello world", "hello world"]
    assert "'knock knock'" in line(name).getMessage()


def test_prompts_of_token_ids_are_logged_as_they_were_sent(telling: httpx.Client, line: Line) -> None:
    assert ask(telling, "ids", prompt=[5, 6]).status_code == 200
    assert fields_of(line("ids"))["prompts"] == [[5, 6]]


def test_mistakes_are_quoted_if_prompts_are_switched_on(telling: httpx.Client, line: Line) -> None:
    assert ask(telling, "quoted", surprise=1).status_code == 400
    assert fields_of(line("quoted"))["error"].startswith("surprise is not a parameter")
