"""What the engine describes itself, written by the engine."""

from __future__ import annotations

import httpx
import pytest

from tests.api.fake_engine import FakeEngine


@pytest.mark.parametrize("what", ["kv_cache", "settings", "rollouts", "fidelity"])
def test_the_engines_own_description(engine: FakeEngine, http: httpx.Client, what: str) -> None:
    response = http.get(f"/v1/{what}")
    assert response.headers["content-type"] == "application/json"
    assert response.content == engine.answers[what]
