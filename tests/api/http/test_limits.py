"""What a request may take: bytes, seconds, and which error it gets when it takes more."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest

from server.engine.ipc.messages import Cancel, Submit, Tokens
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, Script, generates, silent
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of
from tests.api.raw_http import connect, raw_get, raw_post, read_response, send_raw
from tests.patience import PATIENCE

BYTES = 4096
TIMEOUT = 1  # seconds


@contextlib.contextmanager
def served(script: Script, **settings: object) -> Iterator[tuple[Api, FakeEngine]]:
    with running_api(**settings) as api, FakeEngine(api.socket_path, script) as engine:
        api.await_ready()
        yield api, engine


@pytest.fixture(scope="module")
def small() -> Iterator[Api]:
    """Few bytes."""
    with served(generates([100]), max_header_bytes=BYTES, max_body_bytes=BYTES) as (api, _):
        yield api


@pytest.fixture(scope="module")
def hasty() -> Iterator[Api]:
    """Little time for sending."""
    with (
        pytest.MonkeyPatch.context() as patch,
        served(generates([100]), header_timeout=TIMEOUT, body_timeout=TIMEOUT) as (api, _),
    ):
        patch.setattr("server.api.http.connection.LINGER", 0.5)
        yield api


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("length", "status"), [(BYTES, 200), (BYTES + 1, 413)])
def test_a_body_may_have_as_many_bytes_as_the_settings_say(small: Api, length: int, status: int, chunked: bool) -> None:
    body = json.dumps(VALID_REQUEST).encode().ljust(length)
    headers = {"content-type": "application/json"}
    answer = httpx.post(
        f"{small.url}/v1/completions",
        content=iter([body[:99], body[99:]]) if chunked else body,
        headers=headers,
        timeout=PATIENCE,
    )
    assert answer.status_code == status, answer.text
    assert status == 200 or f"longer than {BYTES} bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("length", "status"), [(BYTES - 200, 200), (BYTES + 1, 431)])
@pytest.mark.parametrize("where", ["headers", "path"])
def test_headers_may_have_as_many_bytes_as_the_settings_say(small: Api, length: int, status: int, where: str) -> None:
    if where == "path":
        answer = send_raw(small.url, raw_get("/health?" + "a" * length))
    else:
        answer = send_raw(small.url, raw_get("/health", f"x: {'a' * length}"))
    assert answer.status_code == status


def test_a_client_gets_the_error_while_it_still_sends(small: Api) -> None:
    """openai reads the answer although it could not send everything."""
    with (
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="-", max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match="longer than") as raised,
    ):
        client.completions.create(model="tiny", prompt="x" * 10_000_000)
    assert raised.value.status_code == 413


def test_so_does_one_whose_connection_then_ends(small: Api) -> None:
    """urllib sends `Connection: close`, and reads no answer before it has sent everything."""
    request = urllib.request.Request(f"{small.url}/v1/completions", b"x" * 10_000_000)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=PATIENCE)
    with raised.value as answer:
        assert answer.code == 413
        assert b"longer than" in answer.read()


def test_the_connection_is_good_for_the_next_request(small: Api) -> None:
    with httpx.Client(base_url=small.url, timeout=PATIENCE) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=VALID_REQUEST | {"prompt": "x" * BYTES}).status_code == 413
            assert client.post("/v1/completions", json=VALID_REQUEST).status_code == 200


# ---------------------------------------------------------------- seconds that a client takes
def connections(stack: contextlib.ExitStack, api: Api, sent: Sequence[bytes]) -> list[tuple[bytes, socket.socket]]:
    """One for each of these, all at once: they wait together."""
    return [(each, stack.enter_context(connect(api.url, each))) for each in sent]


def test_a_connection_that_sends_nothing_is_closed(hasty: Api) -> None:
    with contextlib.ExitStack() as stack:
        for idle in [stack.enter_context(connect(hasty.url)) for _ in range(50)]:
            assert idle.recv(1) == b""


def test_headers_that_stand_still(hasty: Api) -> None:
    """In the first request of a connection, and in the next."""
    parts = (b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nx: y")
    with contextlib.ExitStack() as stack:
        for sent, connection in connections(stack, hasty, [*parts, *(raw_get("/health") + part for part in parts)]):
            with connection.makefile("rb") as stream:
                *_, status, rest = stream.read().rpartition(b"HTTP/1.1 408 ")
            assert status, sent
            assert b"\r\nx-should-retry: false\r\n" in rest, sent
            assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout", sent


def test_headers_that_drip(hasty: Api) -> None:
    with connect(hasty.url, b"GET /health HTTP/1.1\r\n") as connection, contextlib.suppress(ConnectionError):
        began = time.monotonic()
        while time.monotonic() < began + 20:
            connection.sendall(b"x: y\r\n")
            time.sleep(0.1)
    assert time.monotonic() < began + 20


def test_a_body_that_stands_still(hasty: Api) -> None:
    """Its connection is closed, too."""
    with contextlib.ExitStack() as stack:
        for sent, connection in connections(stack, hasty, [raw_post(part, length=100) for part in (b"", b'{"model"')]):
            answer = read_response(connection)
            assert answer.status_code == 408, sent
            assert answer.headers["x-should-retry"] == "false", sent
            assert answer.json()["error"]["code"] == "body_timeout", sent
            assert connection.recv(1) == b"", sent


def test_a_body_may_take_longer_as_long_as_it_moves(hasty: Api) -> None:
    body = json.dumps(VALID_REQUEST).encode()
    with connect(hasty.url, raw_post(b"", length=len(body))) as connection:
        for start in range(0, len(body), 4):
            time.sleep(TIMEOUT / 5)  # eight times
            connection.sendall(body[start : start + 4])
        assert read_response(connection).status_code == 200


def test_a_client_that_does_not_read(encode: Encode) -> None:
    """More than fits between it and the server."""
    with served(generates(encode("hello") * 50_000, None), body_timeout=1) as (api, engine):
        body = json.dumps(VALID_REQUEST | {"stream": True}).encode()
        with connect(api.url, raw_post(body)):
            engine.wait_for(Submit)
            engine.wait_for(Cancel)


# ---------------------------------------------------------------- seconds that a request takes
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_does_not_get_its_place(stream: bool) -> None:
    with served(silent, queue_timeout=0.2) as (api, engine):
        answer = httpx.post(
            f"{api.url}/v1/completions", json=VALID_REQUEST | {"stream": stream, "n": 2}, timeout=PATIENCE
        )
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert {cancel.outcome for cancel in engine.wait_for(Cancel, 2)} == {"error"}, "its client did not leave"


def test_one_that_has_its_place_may_take_longer() -> None:
    with (
        served(generates([100], None), queue_timeout=1) as (api, engine),
        httpx.stream(
            "POST", f"{api.url}/v1/completions", json=VALID_REQUEST | {"stream": True}, timeout=PATIENCE
        ) as answer,
    ):
        (submit,) = engine.wait_for(Submit)
        time.sleep(1.2)
        engine.send(Tokens(submit.request_id, [101], "length"))
        assert "error" not in answer.read().decode()


@pytest.mark.parametrize("script", [silent, generates([100, 101], None)])
def test_an_answer_that_takes_too_long(script: Script) -> None:
    with served(script, request_timeout=0.3) as (api, engine):
        answer = httpx.post(f"{api.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE)
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"  # it would take as long again
        assert answer.json()["error"]["code"] == "request_timeout"
        assert answer.json()["error"]["type"] == "server_error"
        assert [cancel.outcome for cancel in engine.wait_for(Cancel)] == ["error"]


def test_a_stream_that_takes_too_long(encode: Encode) -> None:
    with served(generates(encode("hello"), None), request_timeout=1) as (api, engine):
        answer = httpx.post(f"{api.url}/v1/completions", json=VALID_REQUEST | {"stream": True}, timeout=PATIENCE)
        assert answer.status_code == 200
        first, *_, last = chunks_of(answer)
        assert first["choices"][0]["text"]
        assert last["error"]["code"] == "request_timeout"
        assert [cancel.outcome for cancel in engine.wait_for(Cancel)] == ["error"]
