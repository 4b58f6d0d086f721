"""Calls of tools as openai-python sees them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState

from server.engine.ipc.messages import FromEngine, Submit, Tokens
from tests.api.fake_engine import admitted, scores
from tests.api.openai.tools.conftest import ToolServer
from tests.api.openai.tools.tool_chats import (
    CALL,
    MESSAGES,
    OTHER,
    SECOND,
    TOOL,
    ask,
    calls_of,
    stream,
)
from tests.api.payloads import chunks_of


def test_a_call(qwen: ToolServer) -> None:
    qwen.says(CALL)
    (choice,) = ask(qwen).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.startswith("call_")
    assert call.function.arguments == '{"city": "Z\u00fcrich \u2603"}'


def test_the_prompt_has_the_tools(qwen: ToolServer) -> None:
    qwen.says("Hm.")
    ask(qwen)
    (submit,) = qwen.engine.all(Submit)
    prompt = qwen.decode(submit.prompt)
    assert json.dumps(TOOL) in prompt
    assert json.dumps(OTHER) in prompt
    assert qwen.http.post("/apply-template", json={"messages": MESSAGES, "tools": [TOOL, OTHER]}).json() == {
        "prompt": prompt
    }
    counted = qwen.http.post("/tokenize", json={"messages": MESSAGES, "tools": [TOOL, OTHER]}).json()
    assert counted["tokens"] == list(submit.prompt)


def test_keys_of_a_tool_stay_in_their_order(qwen: ToolServer) -> None:
    parameters = {"required": ["a"], "type": "object", "properties": {"a": {"type": "string"}}}
    mixed = {
        "function": {"parameters": parameters, "strict": None, "name": "f", "description": "d"},
        "type": "function",
    }
    text = qwen.http.post("/apply-template", json={"messages": MESSAGES, "tools": [mixed]}).json()["prompt"]
    del mixed["function"]["strict"]  # type: ignore[attr-defined]
    assert json.dumps(mixed) in text


@pytest.mark.parametrize(
    "text", [CALL, f"I look.\n\n{CALL}", f"{CALL}\n{SECOND}", "Hello! \n", "<think>Hm.</think>\nNo."]
)
def test_a_stream_has_the_same_message(qwen: ToolServer, text: str) -> None:
    qwen.says(text)
    (whole,) = ask(qwen).choices
    streamed = stream(qwen)
    assert calls_of(streamed.message) == calls_of(whole.message)
    assert (streamed.message.content or None) == whole.message.content
    assert streamed.finish_reason == whole.finish_reason
    assert getattr(streamed.message, "reasoning", None) == getattr(whole.message, "reasoning", None)


def test_chunks_of_a_stream(qwen: ToolServer) -> None:
    qwen.says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{SECOND}")
    chunks = chunks_of(qwen.chat(tools=[TOOL, OTHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in first] == [
        (0, "function", "get_weather"),
        (1, "function", "get_time"),
    ]
    assert all(call.keys() == {"index", "function"} for call in calls if call not in first)
    parts = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert len(parts) > 9
    assert "".join(parts) == '{"city": "Z\u00fcrich \u2603"}'
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert deltas[-1] == {}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.dictionaries(st.text(max_size=5), st.text(max_size=12) | st.integers() | st.none(), max_size=3))
def test_arguments_arrive_unchanged(qwen: ToolServer, arguments: dict[str, Any]) -> None:
    """Through tokens that are parts of characters, whole and streamed."""
    written = json.dumps({"name": "get_weather", "arguments": arguments}, ensure_ascii=False)
    qwen.says(f"<tool_call>{written}</tool_call>")
    assert calls_of(ask(qwen).choices[0].message) == [("get_weather", arguments)]
    assert calls_of(stream(qwen).message) == [("get_weather", arguments)]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_grouping_of_tokens_makes_the_same_message(qwen: ToolServer, data: st.DataObject) -> None:
    """As speculation and a busy server make them: several tokens in an event, several events in a frame."""
    text = f"<think>\n\u00e4h \u2603\n</think>\n\n\u00dcber <b>\n{CALL}\n{SECOND}"
    tokens = [*qwen.encode(text), *qwen.encode("<|im_end|>")]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=30), label="cuts"))
    groups = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]

    def script(submit: Submit) -> list[list[FromEngine]]:
        last = len(groups) - 1
        events = [Tokens(submit.request_id, group, "stop" if i == last else None) for i, group in enumerate(groups)]
        size = len(groups) % 3 + 1
        return [[admitted(submit)], *([*events[i : i + size]] for i in range(0, len(events), size))]

    qwen.engine.begin_again(script)
    expected = [("get_weather", {"city": "Z\u00fcrich \u2603"}), ("get_time", {})]
    for choice in (ask(qwen).choices[0], stream(qwen)):
        assert (choice.message.content, choice.message.reasoning) == ("\u00dcber <b>", "\u00e4h \u2603")
        assert calls_of(choice.message) == expected
        assert choice.finish_reason == "tool_calls"


def test_only_the_first_call_without_parallel_calls(qwen: ToolServer) -> None:
    qwen.says(f"{CALL}\n{SECOND}")
    assert [name for name, _ in calls_of(ask(qwen).choices[0].message)] == ["get_weather", "get_time"]
    assert [name for name, _ in calls_of(ask(qwen, parallel_tool_calls=False).choices[0].message)] == ["get_weather"]
    assert [name for name, _ in calls_of(stream(qwen, parallel_tool_calls=False).message)] == ["get_weather"]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "get_w', "<tool_call>oops</tool_call>", CALL[:48]])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_malformed_call_is_text(qwen: ToolServer, text: str, reason: str) -> None:
    qwen.says(text, reason)
    (choice,) = ask(qwen).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, reason)
    chunks = chunks_of(qwen.chat(tools=[TOOL], stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def test_a_call_that_max_tokens_cuts_off(qwen: ToolServer) -> None:
    """As OpenAI does: its arguments are what there is of them, and the finish reason says so."""
    qwen.says(CALL[:-20], "length")
    for choice in (ask(qwen).choices[0], stream_choice(qwen)):
        assert (choice.message.content or None, choice.finish_reason) == (None, "length")
        (call,) = choice.message.tool_calls
        assert '{"city": "Z\u00fcrich \u2603"}'.startswith(call.function.arguments)
        assert len(call.function.arguments) > 9


def stream_choice(server: ToolServer) -> Any:
    """Return the choice that a stream adds up to, also if it was cut off, for which openai's helper raises."""
    state = ChatCompletionStreamState()
    for chunk in server.client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL], stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


def test_a_call_before_the_end_of_the_tokens(qwen: ToolServer) -> None:
    """The call is there, and the reason says that the message may lack others."""
    qwen.says(CALL + "\n<tool_call>", "length")
    (choice,) = ask(qwen).choices
    assert calls_of(choice.message) == [("get_weather", {"city": "Z\u00fcrich \u2603"})]
    assert choice.finish_reason == "length"


def test_tokens_and_logprobs_of_a_call(qwen: ToolServer) -> None:
    """All tokens are there, also those that are no text of the message."""
    text = f"I look.\n{CALL}"
    qwen.engine.begin_again(scores(qwen.encode(text), "length"))
    body: dict[str, Any] = {"tools": [TOOL], "logprobs": True, "return_token_ids": True}
    (choice,) = qwen.chat(**body).json()["choices"]
    assert choice["token_ids"] == qwen.encode(text)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    chunks = [chunk["choices"][0] for chunk in chunks_of(qwen.chat(**body, stream=True))]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]


def test_no_calls_without_tools(qwen: ToolServer) -> None:
    """Then the markers, special tokens of this model, have no text, as always."""
    qwen.says(CALL)
    for body in ({"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,) = ask(qwen, **body).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert "get_weather" in choice.message.content
        assert "tool_call" not in choice.message.content


def test_several_choices(qwen: ToolServer) -> None:
    qwen.says(CALL)
    result = ask(qwen, n=3)
    ids = {choice.message.tool_calls[0].id for choice in result.choices}
    assert len(ids) == 3


def test_calls_and_answers_in_the_prompt(qwen: ToolServer) -> None:
    qwen.says(f"I look.\n{CALL}")
    message = ask(qwen).choices[0].message
    (call,) = message.tool_calls
    qwen.says("It snows.")
    talk = [*MESSAGES, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
    assert ask(qwen, messages=talk).choices[0].message.content == "It snows."
    prompt = qwen.decode(qwen.engine.all(Submit)[-1].prompt)
    assert CALL in prompt
    assert "<tool_response>\nsnow\n</tool_response>" in prompt


def test_other_families(mistral: ToolServer, gpt_oss: ToolServer) -> None:
    mistral.says('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}]')
    for choice in (ask(mistral).choices[0], stream(mistral)):
        assert calls_of(choice.message) == [("get_weather", {"city": "Bern"})]
        assert len(choice.message.tool_calls[0].id) == 9
    message = mistral.chat(tools=[TOOL]).json()["choices"][0]["message"]
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "snow"}
    assert ask(mistral, messages=[*MESSAGES, message, answer]).choices
    gpt_oss.says(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Bern"}'
    )
    (choice,) = ask(gpt_oss).choices
    assert calls_of(choice.message) == [("get_weather", {"city": "Bern"})]
    assert (choice.message.content, choice.message.reasoning) == (None, "Hm.")
