"""/health and /ready, and every route while there is no engine."""

from __future__ import annotations

import httpx

from tests.api.conftest import Api
from tests.api.fake_engine import FakeEngine
from tests.patience import PATIENCE


def test_ready(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/ready").json() == {"status": "ready", "model": "tiny"}


def test_without_an_engine(lone_api: Api) -> None:
    assert httpx.get(f"{lone_api.url}/health", timeout=PATIENCE).json() == {"status": "ok"}
    for path in ("/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/kv_cache"):
        response = httpx.get(lone_api.url + path, timeout=PATIENCE)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "server_error"
