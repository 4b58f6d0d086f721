"""Requests with tools that are refused, and which field and words their errors have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.engine.ipc.messages import Submit
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.openai.tools.tool_chats import (
    FUNCTION,
    MESSAGES,
    TOOL,
    allowed,
)
from tests.api.payloads import error_of


def wrong(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with a parameter, a list of what this schema says."""
    parameters = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}
    return {"type": "function", "function": {"name": "wrong", "parameters": parameters}}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "type \"custom\" are not supported"),
        ({"tools": [{"function": FUNCTION}]}, "tools[0].type", "required"),
        ({"tools": {"a": 1}}, "tools", "list"),
        ({"tools": [TOOL, TOOL]}, "tools", "several functions of the name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "should match"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "regular expression"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parametrs": {}}}]}, "tools[0].function.parametrs", "did you mean parameters"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "an object"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters", "schema of an object"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}]}, "tools[0].function.parameters", "list of names"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": [["x"]]}}}]}, "tools[0].function.parameters", "list of names"),  # noqa: E501
        ({"tools": [TOOL, wrong({"anyOf": [{}, {"type": 5}]})], "tool_choice": "required"}, "tools", "properties.x.items.anyOf.1.type: 5 is no"),  # noqa: E501
        ({"tools": [TOOL, wrong({"type": "unknown"})], "tool_choice": "required"}, "tools", 'parameters of "wrong": properties.x.items.type: "unknown" is no type of JSON'),  # noqa: E501
        ({"tools": [TOOL, wrong({"$ref": "#/$defs/none"})], "tool_choice": "required"}, "tools", 'of "wrong": '),
        ({"tools": [TOOL, wrong({"pattern": "("})], "response_format": {"type": "json_object"}}, "tools", 'parameters of "wrong": '),  # noqa: E501
        ({"tool_choice": "sometimes"}, "tool_choice", "should be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "should be"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice", "none of the tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "should be"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "should be"),
        ({"tool_choice": allowed("none", "get_weather")}, "tool_choice", "should be"),
        ({"tool_choice": allowed("auto", "nothing")}, "tool_choice", "none of the tools"),
        ({"tool_choice": allowed("auto", "get_weather"), "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}}}, "tool_choice", "should be"),  # noqa: E501
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": None}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "continue_final_message": True}, "tool_choice", "continue_final_message"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"functions": [FUNCTION]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"documents": "text"}, "documents", "list"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}], "tool_choice": "required"}, "tools[0].function.name", ""),
        ({"tools": [TOOL, TOOL], "tool_choice": allowed("auto", "x")}, "tools", "several functions"),
    ],
)  # fmt: skip
def test_refused(qwen: ToolServer, change: dict[str, Any], param: str, words: str) -> None:
    qwen.says("no")
    response = qwen.chat(**{"tools": [TOOL]} | change)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert param == "tool_choice" or "tool_choice:" not in error_of(response)["message"], "an error that follows"
    assert qwen.engine.all(Submit) == []


@pytest.mark.parametrize(
    "schema", [{"type": None, "properties": None}, {"type": ["object"]}, {"type": ["null", "object"]}]
)
def test_schemas_of_objects_in_other_words(qwen: ToolServer, schema: dict[str, Any]) -> None:
    """Templates and grammars get the plain form."""
    qwen.says('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    response = qwen.chat(tools=tools, tool_choice="required")
    assert response.is_success, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert json.dumps({"type": "object"} if schema["type"] else {}) in qwen.prompt


def called(**changes: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call | changes]}


ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": "snow"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([called(), {"role": "tool", "content": "snow"}], "tool_call_id is required"),
        ([called(), ANSWER | {"tool_call_id": "call_2"}], 'answers the tool call "call_2"'),
        ([ANSWER], 'answers the tool call "call_1"'),
        ([ANSWER, called()], 'answers the tool call "call_1"'),
        ([called() | {"role": "user", "content": "x"}], "only an assistant's has"),
        ([called(function={"name": "f", "arguments": []})], "an object"),
        ([called(function={"name": "f", "arguments": 5})], "an object"),
        ([called(function={"arguments": "{}"})], "required"),
        ([called(type="custom")], "function"),
        ([called(), {"role": "tool", "tool_call_id": "call_1"}], "content is required"),
    ],
)
def test_messages_that_are_refused(qwen: ToolServer, messages: list[Any], words: str) -> None:
    qwen.says("no")
    response = qwen.chat(messages=[*MESSAGES, *messages], tools=[TOOL])
    assert response.status_code == 400
    assert words in error_of(response)["message"]
    assert qwen.chat(messages=[*MESSAGES, called(), ANSWER], tools=[TOOL]).is_success


MALFORMED = ['{"city": "Z', "city=Bern", '"Bern"', "[1]", "null", "{'city': 1}", "{}{}", "{" * 9999]


@pytest.mark.parametrize("template", ["qwen3", "mistral_nemo", "gpt_oss", "glm46", "qwen3_coder", "kimi_k2"])
def test_a_call_with_malformed_arguments_does_not_end_a_conversation(template: str) -> None:
    """The prompt has it with empty arguments, as of vLLM; the header names the field."""
    answer = ANSWER | {"tool_call_id": "callnumb1", "content": "the arguments were no JSON"}
    prompts = set()
    with serving_tools(template) as server:
        for written in ("{}", *MALFORMED):
            server.says("Sorry.")
            call = called(id="callnumb1", function={"name": "get_weather", "arguments": written})
            response = server.chat(messages=[*MESSAGES, call, answer], tools=[TOOL])
            assert response.is_success, response.text
            prompts.add(server.decode(server.engine.all(Submit)[0].prompt))
            ignored = response.headers.get("x-ignored-fields")
            assert ignored == (None if written == "{}" else "messages.tool_calls.function.arguments")
    assert len(prompts) == 1
