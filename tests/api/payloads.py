"""A request that is valid, and readers of responses: chunks of a stream, error objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

Encode = Callable[[str], list[int]]  # token ids of a text, without special tokens

VALID_REQUEST: dict[str, Any] = {"model": "tiny", "prompt": "x"}


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a finished stream."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: httpx.Response, *, received: bool = True) -> dict[str, Any]:
    """Return OpenAI's error object. `received`: the application got the request, so that the response has an id."""
    assert response.headers["content-type"] == "application/json"
    assert not received or response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"]
    return dict(body["error"])
