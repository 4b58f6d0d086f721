"""A request ends when its client disconnects, and with an error at once when the engine ends."""

from __future__ import annotations

import json
import socket
import time

import httpx
import openai
import pytest

from server.api.http.errors import ApiError
from server.engine.ipc.messages import Cancel, Failed, Submit, Tokens
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, fails, generates, silent
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of
from tests.api.raw_http import connect, raw_post
from tests.patience import PATIENCE


def begin(api: Api, **body: object) -> socket.socket:
    """A request over a connection that can be closed at any moment."""
    return connect(api.url, raw_post(json.dumps(VALID_REQUEST | body).encode()))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["before admission", "before the first token", "between tokens"])
def test_a_disconnect_cancels(api: Api, engine: FakeEngine, encode: Encode, stream: bool, moment: str, n: int) -> None:
    engine.script = (
        silent if moment == "before admission" else generates(encode("a") * (moment == "between tokens"), None)
    )
    with begin(api, stream=stream, n=n) as connection:
        submits = engine.wait_for(Submit, n)
        if stream and moment == "between tokens":
            assert connection.recv(10)
        assert engine.all(Cancel) == []
    cancels = engine.wait_for(Cancel, n)
    assert {cancel.request_id for cancel in cancels} == {submit.request_id for submit in submits}


def test_an_openai_stream_that_is_closed_cancels(
    engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode
) -> None:
    engine.script = generates(encode("hello"), None)
    with openai_client.completions.create(model="tiny", prompt="x", stream=True) as stream:
        next(iter(stream))
    engine.wait_for(Cancel)


def test_a_choice_that_ended_is_not_cancelled(api: Api, engine: FakeEngine) -> None:
    engine.script = generates([], None)
    with begin(api, stream=True, n=2) as connection:
        first, second = engine.wait_for(Submit, 2)
        engine.send(Tokens(first.request_id, [100], "length"))
        assert connection.recv(10)
        time.sleep(0.05)
    (cancel,) = engine.wait_for(Cancel)
    assert cancel.request_id == second.request_id


def test_one_choice_that_fails_ends_the_request(engine: FakeEngine, http: httpx.Client) -> None:
    paged = generates([100], None)
    engine.script = lambda submit: fails(400)(submit) if submit.request_id.endswith("-2") else paged(submit)
    assert http.post("/v1/completions", json=VALID_REQUEST | {"n": 3}).status_code == 400
    assert len(engine.wait_for(Cancel, 2)) == 2


def test_a_failure_in_mid_stream_is_an_event(engine: FakeEngine, http: httpx.Client) -> None:
    engine.script = lambda submit: [*generates([100], None)(submit), [Failed(submit.request_id, 500, "out of luck")]]
    response = http.post("/v1/completions", json=VALID_REQUEST | {"stream": True})
    *_, last = chunks_of(response)
    assert last == {"error": {"message": "out of luck", "type": "server_error", "param": None, "code": None}}


# ---------------------------------------------------------------- the engine's end
def test_before_there_is_an_engine(lone_api: Api) -> None:
    response = httpx.post(f"{lone_api.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


def test_the_engine_is_lost_before_the_first_byte(lone_api: Api) -> None:
    with FakeEngine(lone_api.socket_path, silent) as engine:
        lone_api.await_ready()
        connection = begin(lone_api)
        engine.wait_for(Submit)
    with connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")


def test_the_engine_is_lost_in_mid_stream(lone_api: Api, encode: Encode) -> None:
    with FakeEngine(lone_api.socket_path, generates(encode("hello"), None)):
        lone_api.await_ready()
        client = openai.OpenAI(base_url=f"{lone_api.url}/v1", api_key="-", max_retries=0)
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        assert next(stream).choices[0].text
    with client, pytest.raises(openai.APIError, match="the engine went away"):
        list(stream)


def test_the_next_engine_is_found(lone_api: Api, encode: Encode) -> None:
    for text in ("hello", "world"):
        with FakeEngine(lone_api.socket_path, generates(encode(text))):
            lone_api.await_ready()
            completion = httpx.post(f"{lone_api.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE).json()
            assert completion["choices"][0]["text"] == text
        lone_api.await_ready(False)


def test_once_it_ends_no_request_is_taken() -> None:
    """One whose body was still on its way when the time to end was over."""
    with running_api() as api, FakeEngine(api.socket_path, generates([100])):
        api.await_ready()
        api.client.fail_all(ApiError(503, "over", code="server_stopping"))
        response = httpx.post(f"{api.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
