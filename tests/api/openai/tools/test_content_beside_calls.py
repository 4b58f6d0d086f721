"""Constrained content, with tools and without: what the grammar of a message accepts, and what is read of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest

from tests.api.fake_engine import generates
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.openai.tools.tool_chats import (
    CALL,
    FORMAT,
    MESSAGES,
    SCHEMA,
    SECOND,
    THOUGHT,
    TOOL,
    WRONG,
    ask,
    calls_of,
    stream,
)
from tests.api.payloads import error_of

ARGUMENTS = {"city": "Bern"}
CALL_JSON = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
CALLS = {  # a call by the chat template
    "qwen3": f"<tool_call>\n{CALL_JSON}\n</tool_call>",
    "hermes2_pro": f"<tool_call>\n{CALL_JSON}\n</tool_call>",
    "mistral_nemo": f"[TOOL_CALLS][{CALL_JSON}]",
    "gpt_oss": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n"
    "</parameter>\n</function>\n</tool_call>",
    "granite33": f"<|tool_call|>[{CALL_JSON}]",
    "phi4_mini": f"<|tool_call|>[{CALL_JSON}]<|/tool_call|>",
}
BEFORE_CONTENT = {"gpt_oss": "<|channel|>final<|message|>"}
PATTERN = r"[a-f]{2,4}|\{x+\}|\[y\]"
TEXTS = ["", "a", "ab", "abcd", "abcde", "{}", "{xx}", "[y]", "yes", "no", "maybe", "a1", "1", '{"sky": "grey"}', "bb"]


class Case(NamedTuple):
    """A constraint of a request, and which texts satisfy it."""

    fields: dict[str, Any]
    accepted: list[str]


def satisfies_schema(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


CASES = {
    "regex": Case({"regex": PATTERN}, [text for text in TEXTS if re.fullmatch(PATTERN, text)]),
    "choice": Case({"choice": ["yes", "no"]}, ["yes", "no"]),
    "gbnf": Case({"grammar": 'root ::= "a" [0-9]'}, ["a1"]),
    "lark": Case({"grammar": '?start: "a" | b\nb: "b" b?'}, ["a", "bb"]),
    "schema": Case({"json": SCHEMA}, [text for text in TEXTS if satisfies_schema(text)]),
}


@pytest.fixture(scope="module", params=CALLS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, ToolServer]]:
    with serving_tools(request.param) as server:
        yield request.param, server


@pytest.mark.parametrize("kind", CASES)
def test_a_message_is_a_call_or_the_content(served: tuple[str, ToolServer], kind: str) -> None:
    template, server = served
    call, before, case = CALLS[template], BEFORE_CONTENT.get(template, ""), CASES[kind]
    assert case.accepted
    for text in (call, *(before + text for text in case.accepted)):
        server.says(text)
        answer = server.chat(tools=[TOOL], structured_outputs=case.fields)
        assert answer.is_success, answer.text
        message = answer.json()["choices"][0]["message"]
        if text == call:
            assert [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]] == [ARGUMENTS]
        else:
            assert message["content"] == text.removeprefix(before)
            assert not message.get("tool_calls")
    assert server.accepts(call)
    assert [text for text in TEXTS if server.accepts(before + text)] == case.accepted
    assert not server.accepts(call.replace("city", "town"))


@pytest.mark.parametrize("before", ["", THOUGHT])
def test_calls_or_content(qwen: ToolServer, before: str) -> None:
    """With response_format, the model writes either calls or JSON, both by their schemas."""
    qwen.says(before + CALL)
    for choice in (ask(qwen, response_format=FORMAT).choices[0], stream(qwen, response_format=FORMAT)):
        assert calls_of(choice.message) == [("get_weather", {"city": "Z\u00fcrich \u2603"})]
        assert choice.finish_reason == "tool_calls"
    for text in (CALL, SECOND, f"{CALL}\n{SECOND}", '{"sky": "grey"}'):
        assert qwen.accepts(before + text), text
    for text in ("", "It snows.", WRONG, '{"sky": "red"}', '{"sky": "grey"}' + CALL):
        assert not qwen.accepts(before + text), text
    content = '{"sky": "clear", "note": "<tool_call>{}</tool_call>"}'
    qwen.says(before + content)
    for choice in (ask(qwen, response_format=FORMAT).choices[0], stream(qwen, response_format=FORMAT)):
        assert (choice.message.content, choice.finish_reason) == (content, "stop")
        assert not choice.message.tool_calls


def test_content_with_tools_that_may_not_be_called(qwen: ToolServer) -> None:
    qwen.says('{"sky": "grey"}')
    ask(qwen, response_format=FORMAT, tool_choice="none")
    assert qwen.accepts('{"sky": "grey"}')
    assert not qwen.accepts(CALL)


def test_errors_of_content_and_of_tools_name_their_field(qwen: ToolServer) -> None:
    bad: Any = {"not": {"type": "string"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": bad}}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    for body, param in (
        ({"response_format": format, "tools": [TOOL]}, "response_format"),
        ({"response_format": FORMAT, "tools": [tool]}, "tools"),
        ({"response_format": format}, "response_format"),
    ):
        error = error_of(qwen.chat(**body))
        assert (error["param"], error["code"]) == (param, "invalid_grammar")
        assert "not" in error["message"]


def test_content_after_reasoning(qwen: ToolServer) -> None:
    """The grammar leaves the reasoning free; a prompt that has ended it allows no other."""
    qwen.says(f'{THOUGHT}{{"sky": "grey"}}')
    choice = ask(qwen, response_format=FORMAT, tools=openai.NOT_GIVEN).choices[0]
    assert (choice.message.content, choice.message.reasoning) == ('{"sky": "grey"}', "Hm, {} or a call?")
    assert qwen.accepts(f'{THOUGHT}{{"sky": "grey"}}')
    assert qwen.accepts('{"sky": "grey"}')
    assert not qwen.accepts(f"{THOUGHT}It snows.")
    qwen.says('{"sky": "grey"}')
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(qwen, response_format=FORMAT, extra_body=off).choices[0].message.content == '{"sky": "grey"}'
    assert not qwen.accepts(f'{THOUGHT}{{"sky": "grey"}}')
    assert qwen.accepts('{"sky": "grey"}')


def test_content_after_reasoning_that_the_prompt_has_begun() -> None:
    """What the model writes first is reasoning, so the content cannot be there."""
    with serving_tools("deepseek_r1_distill") as server:
        server.says('Hm.\n</think>\n\n{"sky": "grey"}')
        asked: Any = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT}
        message: Any = server.client.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", '{"sky": "grey"}')
        assert server.accepts('Hm.\n</think>\n\n{"sky": "grey"}')
        assert not server.accepts('{"sky": "grey"}')


@pytest.mark.parametrize(
    "choice", ["<|im_end|>", "a<|im_end|>b", "</think>", "a <think>", "<tool_call>", CALL, "<|end|>"]
)
@pytest.mark.parametrize("stream_it", [False, True])
def test_a_choice_that_looks_like_a_marker_is_content(qwen: ToolServer, choice: str, stream_it: bool) -> None:
    """It is spelled in ordinary tokens: a special token would be none of the text."""
    asked: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": [choice, "b"]}}, "tools": openai.NOT_GIVEN}
    tokens = [token for character in choice for token in qwen.encode(character)]
    assert not set(tokens) & qwen.vocabulary.special_ids
    qwen.engine.begin_again(generates([*tokens, *qwen.encode("<|im_end|>")], "stop"))
    answer = (stream if stream_it else lambda *args, **body: ask(*args, **body).choices[0])(qwen, **asked)
    assert (answer.message.content, answer.finish_reason) == (choice, "stop")
    assert qwen.accepts_tokens(tokens)
    assert not qwen.accepts("<|im_end|>")


def test_a_choice_that_reads_as_reasoning_or_a_call_is_refused(qwen: ToolServer, gpt_oss: ToolServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for server, choice, fields, is_refused in (
        (qwen, "<think>", {}, True),
        (qwen, "<think> about it", {}, True),
        (qwen, "<think>", off, False),
        (qwen, CALL, {}, False),
        (qwen, CALL, {"tools": [TOOL]}, True),
        (qwen, "see <tool_call>", {"tools": [TOOL]}, False),
        (gpt_oss, "<|end|>", {}, True),
        (gpt_oss, "a<|channel|>b<|message|>c", {}, True),
        (gpt_oss, "<think>", {}, False),
    ):
        server.says("b")
        response = server.chat(structured_outputs={"choice": ["b", choice]}, **fields)
        assert response.status_code == (400 if is_refused else 200), (choice, fields, response.text)
        if is_refused:
            error = error_of(response)
            assert error["param"] == "structured_outputs"
            assert "contains a marker" in error["message"]
            assert json.dumps(choice[:5])[1:-1] in error["message"]
    qwen.engine.begin_again(generates([token for letter in "<think>" for token in qwen.encode(letter)], "length"))
    response = qwen.chat(structured_outputs={"choice": ["<think>"]}, **off)
    assert response.json()["choices"][0]["message"]["content"] == "<think>"
