"""Tools through a whole server: a model that calls a tool and reads its answer, and openai's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.server_process import serving
from tests.end_to_end.tool_model import ANSWER, ARGUMENTS, GREETING, REASONING, write_tool_model
from tests.patience import PATIENCE

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
OTHER: Any = {"type": "function", "function": {"name": "other"}}
GREEDY: dict[str, Any] = {"model": "tools", "temperature": 0}  # another text than it learnt would have no call
QUESTION: Any = {"role": "user", "content": "What is the weather?"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = write_tool_model(tmp_path_factory.mktemp("models") / "tools")
    with (
        serving("--model", str(model), "--kv-memory", "64MiB", "--threads", "1") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = GREEDY | {"messages": [QUESTION], "tools": [TOOL, OTHER]}
    (choice,) = client.chat.completions.create(**asked).choices
    message: Any = choice.message
    assert (choice.finish_reason, message.content, message.reasoning) == ("tool_calls", None, REASONING)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.finish_reason == "tool_calls"
    assert [(each.function.name, each.function.arguments) for each in streamed.message.tool_calls or []] == [
        (call.function.name, call.function.arguments)
    ]
    answer = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    talk = [QUESTION, message.model_dump(), answer]
    (choice,) = client.chat.completions.create(**asked | {"messages": talk}).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", ANSWER, None)


def test_without_tools(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**GREEDY, messages=[QUESTION]).choices
    assert choice.message.content == GREETING


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}, "auto"], ids=str
)
@pytest.mark.parametrize("tools", [[TOOL], [TOOL, OTHER]], ids=len)
def test_choices_of_a_tool(client: openai.OpenAI, choice: Any, tools: list[Any]) -> None:
    asked: dict[str, Any] = GREEDY | {"messages": [QUESTION], "tools": tools, "tool_choice": choice}
    (made,) = client.chat.completions.create(**asked).choices
    (call,) = made.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    whole = client.chat.completions.create(**asked | {"n": 3, "temperature": 0.7})
    assert {each.message.tool_calls[0].function.arguments for each in whole.choices if each.message.tool_calls} == {
        call.function.arguments
    }


def test_a_call_that_has_no_room_for_all_of_it(client: openai.OpenAI) -> None:
    for most in range(1, 64):
        asked: dict[str, Any] = GREEDY | {"messages": [QUESTION], "tools": [TOOL], "max_tokens": most}
        (choice,) = client.chat.completions.create(**asked).choices
        parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(part.content or "" for part in parts) == (choice.message.content or "")
        calls = [call.function for part in parts for call in part.tool_calls or () if call.function is not None]
        arguments = [call.function.arguments for call in choice.message.tool_calls or () if call.type == "function"]
        assert len([call for call in calls if call.name]) == len(arguments)
        assert "".join(call.arguments or "" for call in calls) == "".join(arguments)
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
    else:
        pytest.fail("there was always too little room")


def test_strict_tools_and_a_response_format(client: openai.OpenAI) -> None:
    """The model would write other arguments; grammars hold it to the schema once it has begun a call."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Bern", "Basel"]}}, "required": ["city"]}
    parameters["additionalProperties"] = False
    function = {"name": "get_weather", "parameters": parameters}
    strict: Any = {"type": "function", "function": function | {"strict": True}}
    format: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["clear", "grey"]}}}
    asked: dict[str, Any] = GREEDY | {"messages": [QUESTION], "max_tokens": 200}
    for more in (
        {"tools": [strict]},
        {"tools": [{"type": "function", "function": function}], "response_format": format},
    ):
        (choice,) = client.chat.completions.create(**asked, **more).choices
        message: Any = choice.message
        assert message.reasoning == REASONING
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Bern", "Basel")
        parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, **more, stream=True)]
        calls = [call.function for part in parts for call in part.tool_calls or () if call.index == 0 and call.function]
        assert json.loads("".join(call.arguments or "" for call in calls))["city"] in ("Bern", "Basel")
    (choice,) = client.chat.completions.create(**asked, response_format=format).choices
    assert json.loads(choice.message.content or "") in ("clear", "grey")
