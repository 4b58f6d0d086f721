"""Every response is reported to the engine once: of endpoints, middleware, the framework and connections."""

from __future__ import annotations

import time
from collections import Counter

import httpx
import pytest

from tests.api.conftest import Api
from tests.api.fake_engine import FakeEngine, generates, silent
from tests.api.raw_http import connect, raw_post, send_raw

ASKING = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
def seen(engine: FakeEngine, http: httpx.Client) -> Counter[int]:
    """Responses since the test began, up to the latest `/metrics`."""
    http.get("/metrics")  # so that responses of earlier tests are reported
    engine.counts.responses.clear()
    return engine.counts.responses


def get_reported(http: httpx.Client, seen: Counter[int]) -> dict[int, int]:
    """Return the reported responses but that of the first `/metrics`, which is reported with the next."""
    http.get("/metrics")
    return dict(seen - Counter({200: 1}))


def test_responses_count_once_by_status(
    api: Api, engine: FakeEngine, http: httpx.Client, seen: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = generates([65, 66])
    assert http.post("/v1/completions", json=ASKING).status_code == 200
    assert b"[DONE]" in http.post("/v1/completions", json=ASKING | {"stream": True}).read()
    assert http.post("/v1/completions", json={"model": "tiny"}).status_code == 400
    assert http.get("/nowhere").status_code == 404
    assert http.put("/health").status_code == 405
    assert http.get("/v1/kv_cache/paged").status_code == 401
    assert send_raw(api.url, b"nonsense\r\n\r\n").status_code == 400
    monkeypatch.setattr("server.api.openai.completions.check_prompt", None)
    assert http.post("/v1/completions", json=ASKING).status_code == 500
    assert get_reported(http, seen) == {200: 2, 400: 2, 401: 1, 404: 1, 405: 1, 500: 1}
    seen.clear()
    assert get_reported(http, seen) == {}, "each is reported once"


def test_a_client_that_leaves_before_there_is_a_response(
    api: Api, engine: FakeEngine, http: httpx.Client, seen: Counter[int]
) -> None:
    engine.script = silent
    connection = connect(api.url, raw_post(b'{"model": "tiny", "prompt": "hello"}'))
    time.sleep(0.1)
    connection.close()
    time.sleep(0.1)
    assert get_reported(http, seen) == {499: 1}


def test_responses_are_reported_every_second_and_kept_while_there_is_no_engine(lone_api: Api) -> None:
    assert httpx.get(f"{lone_api.url}/ready").status_code == 503
    with FakeEngine(lone_api.socket_path, silent) as engine:
        deadline = time.monotonic() + 5
        while not engine.counts.responses:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.counts.responses[503] >= 1
    lone_api.await_ready(False)
