"""POST /v1/responses as openai-python sees it: text, reasoning and calls, whole and in events."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ToolChoiceAllowed
from pydantic import BaseModel

from server.engine.ipc.messages import Failed, FromEngine, Submit, Tokens
from tests.api.fake_engine import admitted
from tests.api.openai.tools.conftest import ToolServer, serving_tools
from tests.api.payloads import error_of

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Return the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen() -> Iterator[ToolServer]:
    with serving_tools("qwen3") as server:
        yield server


def test_a_text(qwen: ToolServer) -> None:
    qwen.says("Hello, w\u00f6rld!")
    response = qwen.client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    assert (response.status, response.output_text) == ("completed", "Hello, w\u00f6rld!")
    assert response.id.startswith("resp_")
    (item,) = response.output
    assert (item.type, item.status, item.role) == ("message", "completed", "assistant")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in qwen.prompt


@pytest.mark.parametrize("text", ["Hello!", f"<think>Hm.</think>I look.\n{CALL}"])
def test_every_field_is_as_openai_declares_it(qwen: ToolServer, text: str) -> None:
    """By the validation of OpenAI's own client, which is off by default."""
    qwen.says(text)
    url = qwen.client.base_url
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0, _strict_response_validation=True) as strict:
        response = strict.responses.create(model="tiny", input="Hi", tools=[TOOL])
        assert response.usage is not None
        assert (response.usage.output_tokens_details.reasoning_tokens > 0) == ("think" in text)
        assert strict.responses.create(model="tiny", input="Hi").tool_choice == "auto"


def test_a_call_and_its_output(qwen: ToolServer) -> None:
    qwen.says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    response = qwen.client.responses.create(model="tiny", input=asked, tools=[TOOL])
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm."
    assert message.type == "message"
    assert response.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Z\u00fcrich"})
    qwen.says("It snows.")
    asked += [item.model_dump() for item in response.output]
    asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "snow"})
    assert qwen.client.responses.create(model="tiny", input=asked, tools=[TOOL]).output_text == "It snows."
    prompt = qwen.prompt
    assert f"I look.\n{CALL}" in prompt
    assert "<tool_response>\nsnow\n</tool_response>" in prompt
    assert '"name": "get_weather", "description"' in prompt


def in_groups(
    server: ToolServer, text: str, reason: str, rng: random.Random
) -> Callable[[Submit], list[list[FromEngine]]]:
    """Return a script in which the tokens of a text come in groups, as with speculation."""
    tokens = [*server.encode(text), *(server.encode("<|im_end|>") if reason == "stop" else [])]
    cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens))))
    groups = [tokens[start:end] for start, end in itertools.pairwise([0, *cuts, len(tokens)])]
    ends = [None] * (len(groups) - 1) + [reason]

    def script(submit: Submit) -> list[list[FromEngine]]:
        return [[admitted(submit)], *([Tokens(submit.request_id, *each)] for each in zip(groups, ends, strict=True))]

    return script


@pytest.mark.parametrize(
    "text",
    [
        "Hello!",
        f"<think>Hm.</think>I look.\n{CALL}\n{CALL}",
        f"{CALL}\nWait.\n{CALL}\nDone.",
        f"{CALL[:-12]}\n</tool",
        CALL,
        "",
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_makes_the_same_response(qwen: ToolServer, text: str, reason: str, rng: random.Random) -> None:
    """The items, their order and their states, however the tokens come."""
    qwen.engine.begin_again(in_groups(qwen, text or "<|im_end|>", reason, rng))
    asked: Any = {"model": "tiny", "input": "Weather?", "tools": [TOOL]}
    whole = qwen.client.responses.create(**asked)
    with qwen.client.responses.stream(**asked) as stream:
        events = list(stream)
    streamed = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == ("response.incomplete" if reason == "length" else "response.completed")

    def plain(response: Any) -> list[Any]:
        parts = []
        for item in response.output:
            texts = [part.text for part in getattr(item, "content", None) or []]
            parts.append((item.type, item.status, texts, getattr(item, "name", None), getattr(item, "arguments", None)))
        return parts

    assert plain(streamed) == plain(whole)
    states = [item.status for item in whole.output]
    assert (
        states
        == [*["completed"] * (len(states) - 1), "incomplete" if reason == "length" else "completed"][: len(states)]
    )
    assert streamed.status == whole.status == ("incomplete" if reason == "length" else "completed")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    done = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert added == done == list(range(len(whole.output)))


def test_items_have_the_order_in_which_the_model_writes_them(qwen: ToolServer) -> None:
    """Sent back as they came, those between two answers are one message."""
    qwen.says(f"I look.\n{CALL}\nWait.\n{CALL}\nDone.")
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    output = qwen.client.responses.create(model="tiny", input=asked, tools=[TOOL]).output
    assert [item.type for item in output] == ["message", "function_call", "message", "function_call", "message"]
    assert [item.content[0].text.strip() for item in output if item.type == "message"] == ["I look.", "Wait.", "Done."]
    qwen.says("It snows.")
    asked += [item.model_dump() for item in output]
    asked += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "snow"}
        for item in output
        if item.type == "function_call"
    ]
    assert qwen.client.responses.create(model="tiny", input=asked, tools=[TOOL]).output_text == "It snows."
    assert re.search(rf"I look.\s+Wait.\s+Done.\n{re.escape(CALL)}\n{re.escape(CALL)}<", qwen.prompt)
    mixed = [{"role": "assistant", "content": "a"}, CALLED, {"role": "assistant", "content": [PART]}, ANSWER]
    qwen.http.post("/v1/responses", json={"input": [SAID, *mixed]})
    assert re.search(r"assistant\nab\n<tool_call>\n", qwen.prompt), qwen.prompt


def test_events_have_names(qwen: ToolServer) -> None:
    qwen.says("Hello!")
    lines = qwen.http.post("/v1/responses", json={"input": "Hi", "stream": True}).text.split("\n\n")
    *events, done, _ = lines
    assert done == "data: [DONE]"
    for event in events:
        data, name = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_choices_of_a_tool(qwen: ToolServer) -> None:
    qwen.says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>')
    choice: Any = {"type": "function", "name": "get_weather"}
    (item,) = qwen.client.responses.create(model="tiny", input="x", tools=[TOOL], tool_choice=choice).output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"city": "Bern"}


def test_some_tools_are_allowed(qwen: ToolServer) -> None:
    qwen.says(CALL)
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    other = TOOL | {"name": "get_time"}
    response = qwen.client.responses.create(model="tiny", input="x", tools=[TOOL, other], tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.tool_choice == ToolChoiceAllowed(**choice)
    grammar = qwen.engine.all(Submit)[0].grammar or ""
    assert "get_weather" in grammar
    assert "get_time" not in grammar
    for wrong in (
        {"mode": "none"},
        {"tools": []},
        {"tools": [{"type": "mcp"}]},
        {"tools": [{"type": "function", "name": "f"}]},
    ):
        body = {"input": "x", "tools": [TOOL], "tool_choice": choice | wrong}
        error = error_of(qwen.http.post("/v1/responses", json=body))
        assert error["param"] == "tool_choice", wrong


def test_tools_that_are_left_out_may_be_allowed(qwen: ToolServer) -> None:
    """The model can call none of them, so that it writes text if nothing else is allowed."""
    search, function = {"type": "web_search"}, {"type": "function", "name": "get_weather"}
    for mode, listed, kinds in (
        ("required", [search, function], ["function_call"]),
        ("auto", [function, search], ["function_call"]),
        ("auto", [search], ["message"]),
    ):
        qwen.says(CALL)
        choice = {"type": "allowed_tools", "mode": mode, "tools": listed}
        body = {"input": "x", "tools": [TOOL, search], "tool_choice": choice}
        response = qwen.http.post("/v1/responses", json=body)
        assert response.is_success, response.text
        assert [item["type"] for item in response.json()["output"]] == kinds
        assert response.headers["x-ignored-fields"] == "tools.web_search"


def test_an_answer_may_be_without_content(qwen: ToolServer) -> None:
    prompts = []
    for answers in ([CALLED], [{"role": "assistant", "content": None}, CALLED], [{"role": "assistant"}, CALLED]):
        qwen.says("Hello!")
        response = qwen.http.post("/v1/responses", json={"input": [SAID, *answers, ANSWER, SAID]})
        assert response.is_success, response.text
        prompts.append(qwen.prompt)
    assert prompts[1:] == prompts[:1] * 2


CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
SAID = {"role": "user", "content": "x"}
ANSWER = {"type": "function_call_output", "call_id": "a", "output": "b"}
PART = {"type": "output_text", "text": "b"}


class Place(BaseModel):
    city: str


def test_a_text_by_a_schema(qwen: ToolServer) -> None:
    qwen.says('{"city": "Bern"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form: Any = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    answer = qwen.client.responses.create(model="tiny", input="x", text={"format": form})
    assert json.loads(answer.output_text) == {"city": "Bern"}
    assert answer.text.format.type == "json_schema"
    assert answer.text.format.schema_ == schema
    (submit,) = qwen.engine.all(Submit)
    assert json.dumps(schema)[1:-1] in json.loads(submit.grammar or "")["grammars"][1]["lark_grammar"]
    parsed = qwen.client.responses.parse(model="tiny", input="x", text_format=Place)
    assert parsed.output_parsed == Place(city="Bern")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "should have 1 or more items, not 0"),
        ({"input": 5}, "input", "list of items"),
        ({"input": 5}, "input", "should be a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "parts should be"),
        ({"input": ["x"]}, "input[0]", "should be a message"),
        ({"input": [SAID, {"role": "user", "content": 5}]}, "input[1].content", "list of parts"),
        ({"input": [SAID, {"type": "message", "content": "x"}]}, "input[1].role", "should be user"),
        ({"input": [{"role": "user"}]}, "input[0].content", "should be a text"),
        ({"input": [{"role": "cat", "content": "x"}]}, "input[0].role", '"cat"'),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "not supported"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "should be a text"),
        ({"input": [CALLED, CALLED | {"arguments": {}}]}, "input[1].arguments", "should be a text"),
        ({"input": [CALLED, CALLED | {"call_id": ""}]}, "input[1].call_id", "not be empty"),
        ({"input": [CALLED, ANSWER | {"call_id": "b"}]}, "input[1].call_id", "answers the call"),
        ({"input": [ANSWER, CALLED]}, "input[0].call_id", "answers the call"),
        ({"input": [CALLED, ANSWER | {"output": [{"type": "input_file"}]}]}, "input[1].output[0]", "parts should be"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "x"}, 5]}]}, "input[0].summary[1]", "have a text"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "list of parts"),
        ({"input": [CALLED | {"arguments": f"{{{'[],' * 70000}}}"}]}, "input", "arguments together"),
        ({"input": "x" * 3_000_000}, "input", "longer"),
        ({"input": "x", "max_output_tokens": 20_000}, "max_output_tokens", "context"),
        ({"tools": [TOOL, TOOL | {"parameters": {"type": "string"}}]}, "tools[1].parameters", "schema of an object"),
        ({"tools": [TOOL, TOOL]}, "tools", "several functions"),
        ({"tools": [{"type": "functoin"}]}, "tools[0]", "are not supported"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items"),
        ({"n": 2}, "n", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format.schema", "5 is no type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"inptu": "x"}, "inptu", "did you mean input"),
        ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_output_tokens?"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "did you mean reasoning.effort?"),
        ({"logprobs": True}, "logprobs", "of this endpoint; remove it"),
        ({"tools": [TOOL, TOOL | {"name": "a b"}], "tool_choice": "required"}, "tools[1].name", "match"),
    ],
)  # fmt: skip
def test_refused(qwen: ToolServer, change: dict[str, Any], param: str, words: str) -> None:
    qwen.says("no")
    response = qwen.http.post("/v1/responses", json={"input": "Hi", "instructions": "Be brief."} | change)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert "messages" not in error_of(response)["message"]
    assert qwen.engine.all(Submit) == []


def test_fields_of_all_generation(qwen: ToolServer) -> None:
    qwen.says("Hello!")
    body = {"input": "Hi", "temperature": 0.5, "logit_bias": {"5": 1}, "max_output_tokens": 7, "kv_cache": "short"}
    response = qwen.http.post("/v1/responses", json=body | {"metadata": {"a": "b"}, "store": False})
    assert response.is_success
    assert response.headers["x-ignored-fields"] == "metadata, store"
    (submit,) = qwen.engine.all(Submit)
    assert (submit.kv_cache, submit.sampling.max_tokens, submit.sampling.temperature) == ("short", 7, 0.5)
    assert submit.sampling.logit_bias == ((5, 1.0),)


def test_arguments_come_in_parts(qwen: ToolServer) -> None:
    """Each item is added, extended and done before the next one begins."""
    qwen.says(f"I look.\n{CALL} And:\n{CALL}")
    asked: Any = {"model": "tiny", "input": "Weather?", "tools": [TOOL]}
    whole = qwen.client.responses.create(**asked)
    with qwen.client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    kinds = {"response.output_item.added": "+", "response.function_call_arguments.delta": "a"}
    kinds |= {"response.output_text.delta": "t", "response.output_item.done": "-"}
    order = "".join(kinds.get(event.type, "") for event in events)
    assert re.fullmatch(r"\+t+-\+a{9,}-\+t+-\+a{9,}-", order), order
    parts = [event for event in events if event.type == "response.function_call_arguments.delta"]
    for place in (1, 3):
        assert "".join(part.delta for part in parts if part.output_index == place) == '{"city": "Z\u00fcrich"}'
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.arguments for item in done if item.type == "function_call"] == ['{"city": "Z\u00fcrich"}'] * 2
    assert [item.arguments for item in whole.output if item.type == "function_call"] == ['{"city": "Z\u00fcrich"}'] * 2


def test_a_call_that_is_cut_off(qwen: ToolServer) -> None:
    qwen.says(CALL[:-20], "length")
    response = qwen.client.responses.create(model="tiny", input="Weather?", tools=[TOOL])
    (call,) = response.output
    assert call.type == "function_call"
    assert (response.status, call.status) == ("incomplete", "incomplete")
    assert '{"city": "Z\u00fcrich"}'.startswith(call.arguments)


def test_a_required_call_whose_closing_marker_is_cut_off(qwen: ToolServer, rng: random.Random) -> None:
    qwen.engine.begin_again(in_groups(qwen, CALL[: -len("_call>")], "length", rng))
    asked: Any = {"model": "tiny", "input": "Weather?", "tools": [TOOL], "tool_choice": "required"}
    with qwen.client.responses.stream(**asked) as stream:
        *_, last = stream
    for response in (qwen.client.responses.create(**asked), last.response):
        (call,) = response.output
        assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"city": "Z\u00fcrich"}')


def test_messages_that_the_template_refuses() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('no cats') }}"
    with serving_tools(template) as server:
        error = error_of(server.http.post("/v1/responses", json={"input": [{"role": "user", "content": "cat"}]}))
        assert error["param"] == "input"
        assert error["message"].startswith("input: ")
        assert "no cats" in error["message"]


def test_a_malformed_call_does_not_end_a_conversation(qwen: ToolServer) -> None:
    qwen.says("Sorry.")
    items: Any = [CALLED | {"arguments": '{"city": "Z'}, ANSWER, {"role": "user", "content": "Go on."}]
    assert qwen.client.responses.create(model="tiny", input=items).output_text == "Sorry."


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_the_engine_refuses(qwen: ToolServer, stream: bool) -> None:
    def refuse(submit: Submit) -> list[list[FromEngine]]:
        return [[Failed(submit.request_id, 400, "the prompt is too long", "context_length_exceeded", param="prompt")]]

    qwen.engine.begin_again(refuse)
    response = qwen.http.post("/v1/responses", json={"input": "Hi", "stream": stream})
    assert response.status_code == 400
    assert error_of(response)["param"] == "input"
    assert error_of(response)["code"] == "context_length_exceeded"


BROKEN: dict[str, list[tuple[str, Any, str]]] = {  # by the kind of an item: its field, a wrong value, where that is
    "said": [("role", "cat", "role"), ("content", 5, "content"), ("content", [{"type": "input_image"}], "content[0]")],
    "called": [("arguments", {}, "arguments"), ("name", None, "name"), ("call_id", "", "call_id")],
    "answered": [("call_id", "unknown", "call_id"), ("output", {}, "output"), ("output", ["x"], "output[0]")],
    "thought": [("summary", [{"text": "x"}, {}], "summary[1]"), ("content", "x", "content")],
}


def test_an_error_names_the_item_among_others(qwen: ToolServer, rng: random.Random) -> None:
    kinds: dict[str, Any] = {
        "said": SAID,
        "called": CALLED,
        "answered": ANSWER,
        "thought": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    }
    for _ in range(40):
        drawn = ["called", *rng.choices(list(kinds), k=rng.randrange(6))]
        place = rng.randrange(len(drawn))
        field, wrong, where = rng.choice(BROKEN[drawn[place]])
        items = [kinds[kind] for kind in drawn]
        qwen.says("Hm.")
        assert qwen.http.post("/v1/responses", json={"input": items}).is_success, items
        items[place] = items[place] | {field: wrong}
        response = qwen.http.post("/v1/responses", json={"input": items, "instructions": rng.choice([None, "x"])})
        assert response.status_code == 400, items
        assert error_of(response)["param"] == f"input[{place}].{where}", items
