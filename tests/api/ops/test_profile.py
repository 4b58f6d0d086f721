"""Profiles over HTTP: which requests are allowed, what reaches the engine, and how the trace is returned."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import Failed, Profile, Query
from tests.api.conftest import ADMIN_TOKEN
from tests.api.fake_engine import FakeEngine

HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def ask(http: httpx.Client, body: Any = None, **headers: str) -> httpx.Response:
    return http.post("/v1/profile", json=body, headers=HEADERS | headers)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (None, Profile(200, 10.0)),
        ({}, Profile(200, 10.0)),
        ({"steps": 7}, Profile(7, 10.0)),
        ({"seconds": 0.5}, Profile(200, 0.5)),
        ({"seconds": 60, "steps": 1}, Profile(1, 60.0)),
    ],
)
@pytest.mark.parametrize("coding", ["gzip", "identity"])
def test_the_engine_is_asked_and_its_trace_comes_as_the_client_reads_it(
    engine: FakeEngine, http: httpx.Client, body: Any, wanted: Profile, coding: str
) -> None:
    answer = ask(http, body, **{"Accept-Encoding": coding})
    assert (answer.status_code, answer.json()) == (200, {"traceEvents": []})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("content-encoding", "identity") == coding
    (query,) = engine.all(Query)
    assert query.payload == wanted


@pytest.mark.parametrize("token", ["", "open-sesam"])
def test_without_the_token_a_profile_is_refused(engine: FakeEngine, http: httpx.Client, token: str) -> None:
    answer = http.post("/v1/profile", headers={"Authorization": f"Bearer {token}"} if token else {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert engine.all(Query) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 201}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 61}, "seconds"),
        ({"minutes": 1}, "minutes"),
    ],
)
def test_bad_bodies_are_named(engine: FakeEngine, http: httpx.Client, body: Any, param: str) -> None:
    answer = ask(http, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.all(Query) == []


def test_the_engines_refusal_is_the_response(engine: FakeEngine, http: httpx.Client) -> None:
    engine.refusal = Failed("", 409, "steps are being profiled", "profile_running")
    answer = ask(http)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "profile_running")
