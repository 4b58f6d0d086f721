"""Answers in OpenAI's shape: what is streamed comes to what is whole, and no difference is overlooked."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

import pytest

from tools.torture.answers import Answer, find_difference, find_partial_difference

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
LOGPROBS = {"tokens": ["a", "b", "c"], "token_logprobs": [-0.1, -0.2, -0.3], "top_logprobs": [None, {"x": -1.0}, None]}
WHOLE: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "abc",
            "token_ids": [5, 6, 7],
            "prompt_token_ids": [1, 2],
            "logprobs": LOGPROBS,
            "finish_reason": "length",
        }
    ],
    "usage": USAGE,
}


def read(*chunks: dict[str, Any]) -> Answer:
    answer = Answer()
    for chunk in chunks:
        answer.take(chunk)
    return answer


def cut(whole: dict[str, Any], *places: int) -> list[dict[str, Any]]:
    """The chunks of a stream that says the same, cut before these tokens."""
    choice = whole["choices"][0]
    chunks = []
    for start, end in zip((0, *places), (*places, 3), strict=True):
        part: dict[str, Any] = {"index": 0, "text": choice["text"][start:end]}
        part["token_ids"] = choice["token_ids"][start:end]
        part["logprobs"] = {name: values[start:end] for name, values in choice["logprobs"].items()}
        part["finish_reason"] = choice["finish_reason"] if end == 3 else None
        part |= {"prompt_token_ids": choice["prompt_token_ids"]} if start == 0 else {}
        chunks.append({"choices": [part], "usage": None})
    return [*chunks, {"choices": [], "usage": USAGE}]


@pytest.mark.parametrize("places", [(), (1,), (2,), (1, 2)])
def test_a_stream_comes_to_the_whole_answer(places: tuple[int, ...]) -> None:
    assert find_difference(read(WHOLE), read(*cut(WHOLE, *places))) is None


def test_a_chat_has_its_text_elsewhere() -> None:
    whole = read({"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]})
    deltas: list[dict[str, Any]] = [{"content": "he", "role": "assistant"}, {"content": "llo"}, {}]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    assert find_difference(whole, read(*chunks)) is None


def test_what_a_chat_tells_of_its_prompt_is_compared() -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
    whole, other = ({"choices": [choice], "prompt_token_ids": ids} for ids in ([1, 2], [1, 3]))
    chunks = [{"choices": [], "prompt_token_ids": [1, 2]}, {"choices": [choice]}]
    assert find_difference(read(whole), read(*chunks)) is None
    assert "prompt" in (find_difference(read(whole), read(other)) or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "abd"),
        ("token_ids", [5, 6, 8]),
        ("finish_reason", "stop"),
        ("prompt_token_ids", [1, 3]),
        ("logprobs", LOGPROBS | {"token_logprobs": [-0.1, -0.2, -0.3000000001]}),
        ("stop_reason", "c"),
    ],
)
def test_no_difference_is_overlooked(name: str, value: object) -> None:
    other = deepcopy(WHOLE)
    other["choices"][0][name] = value
    assert name in (find_difference(read(WHOLE), read(other)) or "")


def test_choices_and_usage_are_compared() -> None:
    twice = {"choices": [*WHOLE["choices"], {**WHOLE["choices"][0], "index": 1}]}
    assert "choices" in (find_difference(read(WHOLE), read(twice)) or "")
    more = WHOLE | {"usage": USAGE | {"completion_tokens": 4}}
    assert "usage" in (find_difference(read(WHOLE), read(more)) or "")


def test_the_beginning_of_a_stream_begins_the_answer() -> None:
    chunks = cut(WHOLE, 1, 2)
    for number in range(len(chunks)):
        assert find_partial_difference(read(WHOLE), read(*chunks[:number])) is None
    place = Random().randrange(2)
    chunks[place]["choices"][0]["text"] = "X"
    assert find_partial_difference(read(WHOLE), read(*chunks[: place + 1])) is not None
