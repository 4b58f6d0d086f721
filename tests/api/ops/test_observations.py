"""Every response is reported to the engine once: of endpoints, middleware, the framework and connections."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

from server.engine.ipc.messages import Submit
from tests.api.conftest import BROKEN, Api
from tests.api.fake_engine import FakeEngine, generates, silent
from tests.api.raw_http import connect, raw_post, send_raw
from tests.patience import PATIENCE, eventually

ASKING = {"model": "tiny", "prompt": "hello"}


class Reported:
    """The numbers of responses that the engine was told of."""

    def __init__(self, engine: FakeEngine, http: httpx.Client) -> None:
        self._engine, self._http = engine, http
        self._last = Counter[int]()
        self.read()

    def read(self) -> dict[int, int]:
        """Return those since the last call, once all have been reported."""
        self._http.get("/metrics")  # reports what was before, so that the next 404 to be reported is the following
        before = self._engine.counts.responses[404]
        self._http.get("/nowhere")
        eventually(lambda: self._engine.counts.responses[404] > before)
        last, self._last = self._last, Counter(self._engine.counts.responses)
        return dict(self._last - last - Counter({200: 1, 404: 1}))


@pytest.fixture
def reported(engine: FakeEngine, http: httpx.Client) -> Reported:
    return Reported(engine, http)


def test_responses_count_once_by_status(api: Api, engine: FakeEngine, http: httpx.Client, reported: Reported) -> None:
    engine.script = generates([65, 66])
    assert http.post("/v1/completions", json=ASKING).status_code == 200
    assert b"[DONE]" in http.post("/v1/completions", json=ASKING | {"stream": True}).read()
    assert http.post("/v1/completions", json={"model": "tiny"}).status_code == 400
    assert http.get("/nowhere").status_code == 404
    assert http.put("/health").status_code == 405
    assert http.get("/v1/kv_cache/paged").status_code == 401
    assert send_raw(api.url, b"nonsense\r\n\r\n").status_code == 400
    assert http.post("/v1/completions", json=ASKING | {"prompt": BROKEN}).status_code == 500
    assert reported.read() == {200: 2, 400: 2, 401: 1, 404: 1, 405: 1, 500: 1}
    assert reported.read() == {}, "each is reported once"


def test_a_client_that_leaves_before_there_is_a_response(api: Api, engine: FakeEngine, reported: Reported) -> None:
    engine.script = silent
    before = engine.counts.responses[499]
    with connect(api.url, raw_post(b'{"model": "tiny", "prompt": "hello"}')):
        engine.wait_for(Submit)
    eventually(lambda: engine.counts.responses[499] > before)
    assert reported.read() == {499: 1}


def test_responses_are_reported_every_second_and_kept_while_there_is_no_engine(lone_api: Api) -> None:
    assert httpx.get(f"{lone_api.url}/ready", timeout=PATIENCE).status_code == 503
    with FakeEngine(lone_api.socket_path, silent) as engine:
        eventually(lambda: engine.counts.responses)
        assert engine.counts.responses[503] >= 1
    lone_api.await_ready(False)
