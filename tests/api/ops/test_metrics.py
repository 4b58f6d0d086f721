"""/metrics: its formats, and an engine that does not answer."""

from __future__ import annotations

import httpx
import pytest

from tests.api.conftest import Api
from tests.api.fake_engine import FakeEngine

TEXT = b"# HELP kvmux_things Things.\n# TYPE kvmux_things gauge\nkvmux_things 1.0\n"


def test_metrics(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.content == TEXT
    assert http.head("/metrics").status_code == 200


@pytest.mark.parametrize("version", ["; version=1.0.0", "; version=garbage;q=0.5", ""])
def test_openmetrics_when_asked(engine: FakeEngine, http: httpx.Client, version: str) -> None:
    response = http.get("/metrics", headers={"Accept": f"application/openmetrics-text{version},text/plain;q=0.3"})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert response.content == TEXT + b"# EOF\n"


def test_an_engine_that_does_not_answer(
    api: Api, engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.client, "query_timeout", 0.05)
    engine.answers.clear()
    response = http.get("/metrics")
    assert response.status_code == 503
    assert "did not answer" in response.json()["error"]["message"]
