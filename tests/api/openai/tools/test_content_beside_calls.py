"""With tools, a message is calls or a text of any constraint: what the grammar accepts, and what is read of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest

from tests.api.openai.tools.conftest import ToolServer, serving_tools

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "Bern"}
CALL = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
CALLS = {  # a call by the chat template
    "qwen3": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes2_pro": f"<tool_call>\n{CALL}\n</tool_call>",
    "mistral_nemo": f"[TOOL_CALLS][{CALL}]",
    "gpt_oss": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n"
    "</parameter>\n</function>\n</tool_call>",
    "granite33": f"<|tool_call|>[{CALL}]",
    "phi4_mini": f"<|tool_call|>[{CALL}]<|/tool_call|>",
}
BEFORE_CONTENT = {"gpt_oss": "<|channel|>final<|message|>"}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}}, "required": ["sky"]}
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
