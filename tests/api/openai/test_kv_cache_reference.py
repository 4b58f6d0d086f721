"""With kv_cache_reference each choice has the comparison of its tokens, before its last chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import Compared, Explained, Failed, FromEngine, Submit, Tokens
from tests.api.fake_engine import FakeEngine, admitted
from tests.api.openai.test_kv_cache_fields import RECORD
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def compares(tokens: list[int], *, early: bool = False) -> Callable[[Submit], list[list[FromEngine]]]:
    """Send tokens one by one; the comparison of each comes two frames later, or is over before the text (`early`)."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        assert submit.reference == "paged"
        name = submit.request_id
        frames: list[list[FromEngine]] = [[admitted(submit)]]
        for i, token in enumerate(tokens):
            is_last = i == len(tokens) - 1
            frames.append([Tokens(name, [token], "length" if is_last else None)])
            if is_last and submit.explain:
                frames[-1].append(Explained(name, RECORD))
            if i >= 2 and not early:
                frames[-1].insert(0, compared(name, i - 2))
            if early and i == 1:
                frames[-1] += [compared(name, 0), Compared(name, is_last=True, ended_early="room")]
        if not early:
            frames += [[compared(name, i) for i in range(max(0, len(tokens) - 2), len(tokens))]]
            frames += [[Compared(name, is_last=True)]]
        return frames

    return script


def spell(text: str, encode: Encode) -> list[int]:
    """Return a token for each character."""
    return [token for character in text for token in encode(character)]


def compared(name: str, index: int) -> Compared:
    return Compared(name, [index], [index / 10], [index % 2 == 0], [index + 1])


def expected(count: int) -> dict[str, Any]:
    return {
        "indexes": [*range(count)],
        "kl": [i / 10 for i in range(count)],
        "top1": [i % 2 == 0 for i in range(count)],
        "rank": [i + 1 for i in range(count)],
    }


def ask(http: httpx.Client, *, chat: bool = False, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    request = {"model": "tiny", **CHAT} if chat else VALID_REQUEST
    return http.post(path, json={**request, "kv_cache_reference": "paged", **body})


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("explain", [False, True], ids=["", "explained"])
def test_every_choice_has_the_comparison_of_its_tokens(
    engine: FakeEngine, http: httpx.Client, encode: Encode, chat: bool, explain: bool
) -> None:
    engine.script = compares(spell("hello", encode))
    choices = ask(http, chat=chat, n=2, explain=explain).json()["choices"]
    assert [choice["kv_cache_comparison"] for choice in choices] == [expected(5)] * 2
    assert all(("kv_cache" in choice) == explain for choice in choices)
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    assert texts == ["hello"] * 2


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_has_it_in_chunks_and_ends_after_it(
    engine: FakeEngine, http: httpx.Client, encode: Encode, chat: bool
) -> None:
    engine.script = compares(spell("hello", encode))
    chunks = chunks_of(ask(http, chat=chat, stream=True, explain=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice["kv_cache_comparison"] for choice in choices if "kv_cache_comparison" in choice]
    assert {name: [value for part in parts for value in part[name]] for name in parts[0]} == expected(5)
    assert len(parts) > 1
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "kv_cache" in choices[-1]
    texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(texts) == "hello"
    assert chunks[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_early_says_so(engine: FakeEngine, http: httpx.Client, encode: Encode, stream: bool) -> None:
    engine.script = compares(spell("hello", encode), early=True)
    response = ask(http, stream=stream)
    choices = [c["choices"][0] for c in chunks_of(response)] if stream else response.json()["choices"]
    parts = [choice["kv_cache_comparison"] for choice in choices if "kv_cache_comparison" in choice]
    assert [index for part in parts for index in part["indexes"]] == [0]
    assert parts[-1]["ended_early"] == "room"
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert choices[-1]["finish_reason"] == "length"


def test_tokens_after_a_stop_string_have_no_comparison(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = compares(spell("hello world", encode))
    (choice,) = ask(http, stop="o w").json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hell", "stop")
    assert choice["kv_cache_comparison"]["indexes"] == [*range(len(choice["kv_cache_comparison"]["indexes"]))]
    assert len(choice["kv_cache_comparison"]["indexes"]) <= len("hello w")


def test_a_failure_ends_the_request_though_the_comparison_does_not(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    engine.script = lambda submit: [
        [admitted(submit), Tokens(submit.request_id, encode("h")), Failed(submit.request_id, 500, "broken")]
    ]
    assert ask(http).status_code == 500


def test_without_the_field_nothing_is_compared(engine: FakeEngine, http: httpx.Client) -> None:
    assert "kv_cache_comparison" not in http.post("/v1/completions", json=VALID_REQUEST).json()["choices"][0]
    assert engine.all(Submit)[0].reference is None
