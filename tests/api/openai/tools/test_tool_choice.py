"""The choice of tools: which texts the grammar of a message accepts, and what is read of them."""

from __future__ import annotations

from typing import Any

import pytest

from server.engine.ipc.messages import Submit
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.openai.tools.tool_chats import (
    CALL,
    FORMAT,
    FUNCTION,
    OTHER,
    SECOND,
    THOUGHT,
    TOOL,
    WRONG,
    allowed,
    ask,
    calls_of,
    stream,
)
from tests.api.payloads import chunks_of


def test_a_named_tool_is_called(qwen: ToolServer) -> None:
    """The engine gets a grammar that allows nothing but its call."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    qwen.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>')
    for choice in (ask(qwen, tool_choice=named).choices[0], stream(qwen, tool_choice=named)):
        assert calls_of(choice.message) == [("get_weather", {"city": "Bern"})]
        assert choice.finish_reason == "tool_calls"
    submits = qwen.engine.all(Submit)
    assert all(qwen.decode(each.prompt).endswith("assistant\n") for each in submits)
    assert all("get_weather" in (each.grammar or "") and "get_time" not in (each.grammar or "") for each in submits)
    begun = '<tool_call>\n{"name": "get_weather", "argume'
    qwen.says(begun, "length")
    (choice,) = ask(qwen, tool_choice=named).choices
    assert (choice.message.content, choice.finish_reason) == (begun, "length")


def test_a_call_without_a_marker_of_a_tool_that_is_not_allowed_is_text() -> None:
    """Llama 3 begins a call like any JSON, so the grammar cannot tell it from text."""
    call = '{"name": "get_time", "parameters": {}}'
    with serving_tools("{{ messages[0].content }}{{ tools }}", tool_call_parser="llama3_json") as llama:
        llama.says(call)
        assert calls_of(ask(llama).choices[0].message) == [("get_time", {})]
        llama.says(call)
        (choice,) = ask(llama, tool_choice=allowed("auto", "get_weather")).choices
        assert (choice.message.tool_calls, choice.message.content) == (None, call)


def test_some_tools_are_allowed(qwen: ToolServer) -> None:
    """All tools are in the prompt, so that its beginning is the same whichever are allowed."""
    qwen.says(CALL)
    auto, required = allowed("auto", "get_weather"), allowed("required", "get_weather")
    prompts = []
    for choice in (auto, required, "auto"):
        assert calls_of(ask(qwen, tool_choice=choice).choices[0].message) == calls_of(ask(qwen).choices[0].message)
        assert ask(qwen, tool_choice=choice).choices[0].finish_reason == "tool_calls"
        prompts.append(qwen.engine.all(Submit)[-1].prompt)
    assert prompts[0] == prompts[1] == prompts[2]
    ask(qwen, tool_choice=auto)
    for text, is_allowed in (
        (CALL, True),
        (f"I look.\n{CALL}{CALL}", True),
        ("It snows.", True),
        (SECOND, False),
        (f"{CALL}{SECOND}", False),
    ):
        assert qwen.accepts(text) is is_allowed, text
    ask(qwen, tool_choice=required)
    for text, is_allowed in ((CALL, True), (f"{THOUGHT}{CALL}\n{CALL}", True), ("It snows.", False), (SECOND, False)):
        assert qwen.accepts(text) is is_allowed, text
    ask(qwen, tool_choice=auto, response_format=FORMAT)
    for text, is_allowed in ((CALL, True), ('{"sky": "grey"}', True), (SECOND, False), ("It snows.", False)):
        assert qwen.accepts(text) is is_allowed, text
    for mode, has_grammar in (("auto", False), ("required", True)):
        ask(qwen, tool_choice=allowed(mode, "get_time", "get_weather"))
        assert (qwen.engine.all(Submit)[-1].grammar is not None) is has_grammar
    assert qwen.accepts(f"{CALL}{SECOND}")


def test_a_call_is_required(qwen: ToolServer) -> None:
    qwen.says('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    for choice in (ask(qwen, tool_choice="required").choices[0], stream(qwen, tool_choice="required")):
        assert calls_of(choice.message) == [("get_time", {})]
    grammar = qwen.engine.all(Submit)[0].grammar or ""
    assert "get_time" in grammar
    assert "get_weather" in grammar
    assert qwen.accepts(f"{THOUGHT}{SECOND}"), "the model may think before"
    assert not qwen.accepts(f"I look.\n{SECOND}")


@pytest.mark.parametrize("rest", ["<", "\n<tool_call>", "\n<tool_call>\n", "\n</tool_c"])
def test_required_calls_that_max_tokens_cuts_off_have_no_markers_in_the_content(qwen: ToolServer, rest: str) -> None:
    said = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>' + rest
    qwen.says(said, "length")
    for choice, content in (("required", ""), ("auto", rest.strip())):
        body: dict[str, Any] = {"tools": [TOOL, OTHER], "tool_choice": choice}
        (whole,) = qwen.chat(**body).json()["choices"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(qwen.chat(**body, stream=True))]
        message = whole["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_time"]
        assert (message["content"] or "").strip() == content
        assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
        assert whole["finish_reason"] == "length"


def test_strict_tools(qwen: ToolServer) -> None:
    """A grammar lets the model write what it wants, until it begins a call."""
    strict = {"type": "function", "function": FUNCTION | {"strict": True}}
    qwen.says(f"I look.\n{CALL}")
    response = qwen.chat(tools=[strict, OTHER])
    assert "x-ignored-fields" not in response.headers
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    for text in ("", "It snows.", f"{THOUGHT}I look.\n{CALL} and\n{SECOND}", CALL):
        assert qwen.accepts(text), text
    for text in (WRONG, f"I look: {WRONG}", f"{CALL}{WRONG}", "<tool_call>"):
        assert not qwen.accepts(text), text
    for body in ({"tools": [strict], "tool_choice": "none"}, {"tools": [TOOL]}):
        assert qwen.chat(**body).is_success
        assert qwen.engine.all(Submit)[-1].grammar is None
