"""Routes of /v1 that are there without it, too."""

from __future__ import annotations

import httpx
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.payloads import VALID_REQUEST


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/completions", VALID_REQUEST),
        ("POST", "/responses", {"model": "tiny", "input": "hi"}),
        ("POST", "/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("GET", "/models", None),
        ("GET", "/models/tiny:short", None),
        ("GET", "/kv_cache", None),
        ("GET", "/settings", None),
        ("GET", "/completions", None),
        ("GET", "/models/", None),
    ],
)
def test_without_v1(engine: FakeEngine, http: httpx.Client, method: str, path: str, body: object) -> None:
    without, with_version = (http.request(method, prefix + path, json=body) for prefix in ("", "/v1"))
    assert without.status_code == with_version.status_code
    assert without.json().keys() == with_version.json().keys()
    assert without.status_code in (200, 404, 405)


def test_nothing_else_is_there_without_v1(engine: FakeEngine, http: httpx.Client) -> None:
    for path in ("/completion", "/modelsx", "/chat", "/v1/v1/models", "/v1/tokenize"):
        assert http.get(path).status_code == 404
