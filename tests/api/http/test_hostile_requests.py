"""Hostile inputs get a 4xx in OpenAI's shape, nothing of them reaches the engine, and the server goes on serving."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from server.engine.ipc.messages import Submit
from tests.api.conftest import Api
from tests.api.fake_engine import FakeEngine
from tests.api.hostile_requests import ALL, NOT_RECEIVED, HostileRequest
from tests.api.payloads import VALID_REQUEST, error_of
from tests.api.raw_http import connect, raw_get, raw_post, read_response, send_raw
from tests.patience import PATIENCE


@pytest.mark.parametrize("hostile", ALL, ids=lambda hostile: hostile.name)
def test_is_refused(api: Api, engine: FakeEngine, http: httpx.Client, hostile: HostileRequest) -> None:
    answer = send_raw(api.url, *hostile.sent)
    assert answer.status_code == hostile.status, answer.text
    error = error_of(answer, received=hostile not in NOT_RECEIVED)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", hostile.code, hostile.param)
    assert hostile.param is None or hostile.param in error["message"]
    assert len(error["message"]) < 1500
    assert engine.all(Submit) == []
    assert http.post("/v1/completions", json=VALID_REQUEST).status_code == 200


def test_clients_that_leave_in_the_middle(api: Api, engine: FakeEngine, http: httpx.Client) -> None:
    for part in (b"POST", b"GET / HTTP/1.1\r\nx:", raw_post(b'{"mod', length=100), raw_post(b"", length=100)):
        for _ in range(20):
            connect(api.url, part).close()
    assert http.post("/v1/completions", json=VALID_REQUEST).status_code == 200
    assert len(engine.all(Submit)) == 1


def test_200_connections_that_send_nothing(api: Api, engine: FakeEngine) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(api.url)) for _ in range(200)]
        assert httpx.post(f"{api.url}/v1/completions", json=VALID_REQUEST, timeout=PATIENCE).status_code == 200
        idle[-1].sendall(raw_get("/health"))
        assert read_response(idle[-1]).status_code == 200


def test_requests_before_the_answer_to_the_first(api: Api, engine: FakeEngine) -> None:
    with connect(api.url, raw_get("/health") * 50) as connection:
        received = b""
        while received.count(b"HTTP/1.1 200") < 50:
            received += connection.recv(2**16)
