"""What the tests ask for, and how they read what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

Words = Callable[[str], list[int]]  # token ids of a text, without special tokens

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "x"}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a finished stream."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response, *, heard: bool = True) -> dict[str, Any]:
    """OpenAI's error object. A request that the application never heard of has no id."""
    assert response.headers["content-type"] == "application/json"
    assert not heard or response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"]
    return dict(body["error"])
