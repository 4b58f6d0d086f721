"""Tools of a real model with 151,936 tokens, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.real.serving import ask, connect

pytestmark = pytest.mark.real
WEATHER: Any = [{"role": "user", "content": "What is the weather in Istanbul?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with connect("qwen-0.5b") as client:
        yield client


def test_a_call_that_the_model_chooses_to_write_is_a_call(client: openai.OpenAI) -> None:
    """Qwen2.5-Coder writes it in a block of code, without the markers that its chat template asks for."""
    choice = ask(client, WEATHER, tools=[TOOL])
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert "Istanbul" in call.function.arguments


@pytest.mark.parametrize("choose", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("strict", [False, True])
def test_a_required_call_has_arguments_that_fit(client: openai.OpenAI, choose: Any, strict: bool) -> None:
    tool = TOOL | {"function": TOOL["function"] | {"strict": strict}}
    choice = ask(client, WEATHER, tools=[tool], tool_choice=choose)
    calls = choice.message.tool_calls
    assert calls
    assert choice.finish_reason == "tool_calls"
    for call in calls:
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = ask(client, WEATHER, tools=[TOOL], tool_choice="required").message.tool_calls[0].function
    parts: Any = client.chat.completions.create(
        model="m", messages=WEATHER, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=200, stream=True
    )
    calls = [call for part in parts for choice in part.choices for call in choice.delta.tool_calls or ()]
    first = [call for call in calls if call.index == 0]
    assert "".join(call.function.name or "" for call in first) == whole.name
    assert "".join(call.function.arguments or "" for call in first) == whole.arguments


def test_the_result_of_a_call_is_read(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Istanbul"}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 17, "sky": "cloudy"}'}
    messages = [*WEATHER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert "17" in ask(client, messages, tools=[TOOL], tool_choice="none").message.content
