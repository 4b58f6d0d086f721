"""Chats and structured output with real vocabularies, up to 151,936 tokens, with OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.real.model_files import model_params
from tests.real.serving import ask, connect

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
PERSON: Any = [{"role": "user", "content": "Invent a person. Answer with JSON: name, age and hobbies."}]


@pytest.fixture(scope="module", params=list(model_params(["smollm2", "qwen-0.5b"])))
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with connect(request.param) as client:
        yield client


# ---------------------------------------------------------------- chats
def test_a_chat_answers_and_ends(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert "<|" not in choice.message.content
    assert getattr(choice.message, "reasoning_content", None) is None


def test_a_second_turn_finds_the_first_one_in_the_cache(client: openai.OpenAI) -> None:
    first: Any = [{"role": "user", "content": "Tell me three facts about the moon, a sentence for each."}]
    answer = ask(client, first, max_tokens=50).message.content
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Thanks. One more?"}]
    whole = client.chat.completions.create(model="m", messages=second, max_tokens=8)
    assert whole.usage is not None
    assert whole.kv_cache["cached_tokens"] > whole.usage.prompt_tokens / 2  # type: ignore[attr-defined]


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Greet me in French, Greek and Japanese, with an emoji each."}]
    whole = ask(client, messages, max_tokens=40).message.content
    parts = client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=40, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole


# ---------------------------------------------------------------- structured output
def test_json_fits_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = ask(client, PERSON, response_format=schema, max_tokens=400)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_json_object_is_json(client: openai.OpenAI) -> None:
    choice = ask(client, PERSON, response_format={"type": "json_object"}, max_tokens=100)
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":  # a small model may write a list that is longer than max_tokens
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,10}, \d{4}-\d{2}-\d{2}"}, r"[A-Z][a-z]{2,10}, \d{4}-\d{2}-\d{2}"),
        ({"choice": ["positive", "negative", "不明", "🙂 maybe"]}, r"positive|negative|不明|🙂 maybe"),
        ({"grammar": 'root ::= "SELECT " col ("," col)? " FROM t"\ncol ::= [a-z]{1,8}'}, r"SELECT [a-z,]+ FROM t"),
    ],
)
def test_a_constraint_holds(client: openai.OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    messages = [{"role": "user", "content": "Answer in the form that is asked for."}]
    choice = ask(client, messages, extra_body={"structured_outputs": constraint})
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content)
