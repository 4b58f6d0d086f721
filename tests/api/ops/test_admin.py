"""Administration over HTTP: which requests are allowed, what reaches the engine, and how refusals are reported."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.api.http.api_keys import get_tenant
from server.engine.ipc.messages import (
    Clear,
    Command,
    DropPrefix,
    Failed,
    Inspect,
    PinCachedPrefix,
    PinPrefix,
    Query,
    Share,
    Unpin,
)
from tests.api.conftest import ADMIN_TOKEN
from tests.api.fake_engine import FakeEngine

CACHE = "/v1/kv_cache/paged"
ROUTES: list[tuple[str, str, dict[str, Any] | None, Command]] = [
    ("GET", "", None, Inspect("paged")),
    ("PATCH", "", {"floor": "10%"}, Share("paged", "10%", None)),
    ("PATCH", "", {"floor": "1MiB", "limit": "50%"}, Share("paged", "1MiB", "50%")),
    ("POST", "/clear", None, Clear("paged")),
    ("POST", "/clear", {}, Clear("paged")),
    ("POST", "/clear", {"cache_salt": "mine"}, Clear("paged", "", "mine")),
    ("POST", "/clear", {"api_key": ""}, Clear("paged", "")),
    ("POST", "/clear", {"api_key": "sk-1"}, Clear("paged", get_tenant("Bearer sk-1"))),
    ("POST", "/pins", {"prompt": [1, 2, 3], "ttl": 60}, PinPrefix("paged", [1, 2, 3], 60.0)),
    ("POST", "/pins", {"prompt": [1, 2, 3], "ttl": "10m"}, PinPrefix("paged", [1, 2, 3], 600.0)),
    ("POST", "/pins", {"prefix": "0a1b", "ttl": 60}, PinCachedPrefix("paged", "0a1b", 60.0)),
    ("POST", "/pins", {"prefix": "0a1b", "prompt": None, "ttl": 60}, PinCachedPrefix("paged", "0a1b", 60.0)),
    ("DELETE", "/pins/pin-1", None, Unpin("paged", "pin-1")),
    ("DELETE", "/prefixes/0a1b", None, DropPrefix("paged", "0a1b")),
]


def ask(http: httpx.Client, method: str, path: str, body: Any = None) -> httpx.Response:
    return http.request(method, CACHE + path, json=body, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})


@pytest.mark.parametrize(("method", "path", "body", "command"), ROUTES)
def test_commands_reach_the_engine(
    engine: FakeEngine, http: httpx.Client, method: str, path: str, body: Any, command: Command
) -> None:
    response = ask(http, method, path, body)
    assert (response.status_code, response.json()) == (200, {"obeyed": True})
    (query,) = engine.all(Query)
    assert query.payload == command


@pytest.mark.parametrize(("method", "path", "body", "command"), ROUTES)
@pytest.mark.parametrize("token", ["", "open-sesam", "öffne-dich"])
def test_without_the_token_nothing_does(
    engine: FakeEngine, http: httpx.Client, method: str, path: str, body: Any, command: Command, token: str
) -> None:
    headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
    response = http.request(method, CACHE + path, json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert engine.all(Query) == []


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("PATCH", "", {"floor": "much"}, "floor"),
        ("PATCH", "", {"limit": "101%"}, "limit"),
        ("PATCH", "", {"ceiling": "1%"}, "ceiling"),
        ("PATCH", "", {"floor": "1e-9999999%"}, "floor"),
        ("POST", "/clear", {"cache_salt": ""}, "cache_salt"),
        ("POST", "/clear", {"api_key": "  "}, "api_key"),
        ("POST", "/pins", {"prompt": [2**63], "ttl": 1}, "prompt"),
        ("POST", "/pins", {"prompt": [320], "ttl": 1}, "prompt"),
        ("POST", "/pins", {"prompt": [1] * 300, "ttl": 1}, "prompt"),
        ("POST", "/pins", {"prompt": [1]}, "ttl"),
        ("POST", "/pins", {"prompt": [1], "ttl": 0}, "ttl"),
        ("POST", "/pins", {"prompt": [1], "ttl": 1e9}, "ttl"),
        ("POST", "/pins", {"ttl": 1}, "prompt"),
        ("POST", "/pins", {"prompt": [1], "prefix": "0a1b", "ttl": 1}, "prompt"),
        ("POST", "/pins", {"prefix": "0a1b"}, "ttl"),
        ("POST", "/pins", {"prefix": 3, "ttl": 1}, "prefix"),
        ("POST", "/pins", {"prefix": "x" * 300, "ttl": 1}, "prefix"),
        ("POST", "/pins", {"prefix": "0a1b", "ttl": 1, "api_key": "sk-1"}, "api_key"),
        ("POST", "/pins", {"prefix": "0a1b", "ttl": 1, "cache_salt": "mine"}, "cache_salt"),
    ],
)
def test_bad_bodies_are_named(
    engine: FakeEngine, http: httpx.Client, method: str, path: str, body: Any, param: str
) -> None:
    response = ask(http, method, path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.all(Query) == []


@pytest.mark.parametrize("status", [404, 409])
def test_a_refusal_by_the_engine_is_the_response(engine: FakeEngine, http: httpx.Client, status: int) -> None:
    engine.refusal = Failed("", status, "no, because", "not_so")
    response = ask(http, "GET", "")
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["code"]) == (status, "no, because", "not_so")
