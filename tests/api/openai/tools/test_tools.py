"""Chats with tools as openai-python sees them: calls, whole and streamed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState

from config.errors import SettingsError
from server.engine.ipc.messages import FromEngine, Submit, Tokens
from tests.api.fake_engine import admitted, generates, scores
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.payloads import chunks_of, error_of

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "description": "Return the time."}}
FUNCTION = TOOL["function"]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Z\u00fcrich?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\u00fcrich \u2603"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def ask(server: ToolServer, **body: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL, OTHER]}
    return server.client.chat.completions.create(**asked | body)


def stream(server: ToolServer, **body: Any) -> Any:
    """Return the message that openai's helper makes of a stream, and its finish reason."""
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL, OTHER]}
    with server.client.chat.completions.stream(**asked | body) as events:
        for _ in events:
            pass
        (choice,) = events.get_final_completion().choices
        return choice


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


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


# ---------------------------------------------------------------- the choice of a tool
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


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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


SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["clear", "grey"]}}, "required": ["sky"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
WRONG = CALL.replace("city", "town")
THOUGHT = "<think>\nHm, {} or a call?\n</think>\n\n"


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


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "type \"custom\" are not supported"),
        ({"tools": [{"function": FUNCTION}]}, "tools[0].type", "required"),
        ({"tools": {"a": 1}}, "tools", "list"),
        ({"tools": [TOOL, TOOL]}, "tools", "several functions of the name"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parametrs": {}}}]}, "tools[0].function.parametrs", "did you mean parameters"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "dictionary"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters", "schema of an object"),  # noqa: E501
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}]}, "tools[0].function.parameters", "list of names"),  # noqa: E501
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
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
        ({"functions": [FUNCTION]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"documents": "text"}, "documents", "list"),
    ],
)  # fmt: skip
def test_refused(qwen: ToolServer, change: dict[str, Any], param: str, words: str) -> None:
    qwen.says("no")
    response = qwen.chat(**{"tools": [TOOL]} | change)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert qwen.engine.all(Submit) == []


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
        ([called(function={"name": "f", "arguments": []})], "dictionary"),
        ([called(function={"name": "f", "arguments": 5})], "dictionary"),
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


def test_models_without_tools() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with serving_tools(plain) as server:
        refused = server.chat(tools=[TOOL])
        assert (refused.status_code, error_of(refused)["code"]) == (400, "tools_not_supported")
        assert "tool_call_parser" in error_of(refused)["message"]
        assert "no place for tools" in error_of(server.chat(tools=[TOOL], tool_choice="none"))["message"]
        assert "no place for documents" in error_of(server.chat(documents=[{"text": "a"}]))["message"]
    with serving_tools(plain + "{{ tools }}", tool_call_parser="hermes") as server:
        server.says(CALL)
        assert ask(server).choices[0].message.tool_calls


def test_settings() -> None:
    with serving_tools("qwen3", tool_call_parser="off", reasoning_parser="off") as server:
        assert server.chat(tools=[TOOL]).status_code == 400
        server.says("<think>Hm.</think>Yes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        assert choice.message.content == "<think>Hm.</think>Yes."
    with serving_tools("qwen3", reasoning_parser="deepseek_r1") as server:
        server.says("Hm.</think>Yes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        message: Any = choice.message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_ends_the_start(setting: str) -> None:
    with (
        pytest.raises(SettingsError, match=f"{setting}: 'hermas' is not one of auto, off"),
        serving_tools("qwen3", **{setting: "hermas"}),
    ):
        pass


# ---------------------------------------------------------------- reasoning
def test_reasoning(qwen: ToolServer) -> None:
    qwen.says("<think>\nHm.\n</think>\n\nYes.")
    (choice,) = ask(qwen, tools=openai.NOT_GIVEN).choices
    assert (choice.message.reasoning, choice.message.reasoning_content) == ("Hm.", "Hm.")
    assert choice.message.content == "Yes."
    (choice,) = ask(qwen, extra_body={"include_reasoning": False}).choices
    assert not hasattr(choice.message, "reasoning")
    assert choice.message.content == "Yes."
    chunks = chunks_of(qwen.chat(stream=True, include_reasoning=False))
    assert all("reasoning" not in chunk["choices"][0]["delta"] for chunk in chunks)


def test_thinking_can_be_switched_off(qwen: ToolServer) -> None:
    qwen.says("Yes.")
    (choice,) = ask(qwen, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    assert choice.message.content == "Yes."
    assert not hasattr(choice.message, "reasoning")
    assert qwen.decode(qwen.engine.all(Submit)[0].prompt).endswith("<think>\n\n</think>\n\n")


def test_reasoning_that_the_prompt_begins() -> None:
    with serving_tools("deepseek_r1_distill") as server:
        server.says("Hm.\n</think>\n\nYes.")
        (choice,) = server.client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        message: Any = choice.message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")
