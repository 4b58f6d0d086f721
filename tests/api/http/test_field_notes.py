"""Fields of a request: those without effect, those that would have one, and unknown ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from server.api.http.json_body import MAX_REPORTED_NAME_LENGTH, MAX_REPORTED_NAMES
from server.api.openai.chat import ChatRequest
from server.api.openai.completions import CompletionRequest
from server.api.openai.conversation import PART_FIELDS, AssistantToolCall, Function, Message
from server.engine.ipc.messages import Submit
from server.text.chat.template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tests.api.conftest import ADMIN_TOKEN, running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import chunks_of, error_of
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import byte_level

USER = {"role": "user", "content": "hello"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
}
SENT: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "prediction": {"type": "content", "content": "hello"},
    "verbosity": "low",
}
WRONG: dict[type, list[Any]] = {
    str: [{}, [], 5, True, ["me"]],
    dict: ["x", [], 5, True, [{}]],
    bool: ["true", 1, 0, {}, []],
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return http.post(path, json={"model": "tiny"} | PATHS[path] | body)


def said(http: httpx.Client, *messages: dict[str, Any]) -> httpx.Response:
    return ask(http, "/v1/chat/completions", messages=list(messages))


def prompt_of(engine: FakeEngine) -> str:
    """The text of the latest prompt."""
    return byte_level().decode(engine.all(Submit)[-1].prompt)


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [name for name in answer.headers.get("x-ignored-fields", "").split(", ") if name]


# ---------------------------------------------------------------- what OpenAI's clients know
def test_every_field_of_openais_client_is_known() -> None:
    known = {"stream", *completion_create_params.CompletionCreateParamsBase.__annotations__}
    assert known <= CompletionRequest.model_fields.keys()
    assert {"stream", *chat_create_params.CompletionCreateParamsBase.__annotations__} <= ChatRequest.model_fields.keys()


def test_every_field_of_openais_messages_is_known() -> None:
    """In what is sent, and in answers that are sent back."""
    kinds: list[type] = [
        chat.ChatCompletionUserMessageParam,
        chat.ChatCompletionSystemMessageParam,
        chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionToolMessageParam,
        chat.ChatCompletionFunctionMessageParam,
        chat.ChatCompletionMessage,
        chat.ParsedChatCompletionMessage,
    ]
    for kind in kinds:
        assert kind.__annotations__.keys() <= Message.model_fields.keys()
    assert chat.ChatCompletionContentPartTextParam.__annotations__.keys() <= PART_FIELDS
    calls: list[type] = [chat.ChatCompletionMessageFunctionToolCallParam, chat.ParsedFunctionToolCall]
    for call in calls:
        assert call.__annotations__.keys() <= AssistantToolCall.model_fields.keys()
    assert chat.parsed_function_tool_call.ParsedFunction.__annotations__.keys() <= Function.model_fields.keys()


# ---------------------------------------------------------------- without effect
@pytest.mark.parametrize("field", SENT)
def test_a_field_without_effect_is_taken_and_named(
    engine: FakeEngine, http: httpx.Client, path: str, field: str
) -> None:
    plain = ask(http, path, seed=1)
    answer = ask(http, path, seed=1, **{field: SENT[field]})
    assert ignored(answer) == [field]
    assert ignored(plain) == ignored(ask(http, path, **{field: None})) == []
    assert answer.json()["choices"] == plain.json()["choices"]
    first, second, _ = engine.all(Submit)
    assert (first.prompt, first.sampling, first.caching) == (second.prompt, second.sampling, second.caching)


def test_a_stream_names_them_too(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    answer = ask(http, path, stream=True, stream_options={"include_obfuscation": True}, **SENT)
    assert chunks_of(answer)
    assert set(ignored(answer)) == {"stream_options.include_obfuscation", *SENT}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in SENT for value in WRONG[type(SENT[field])]], ids=str
)
def test_its_outermost_type_is_checked(
    engine: FakeEngine, http: httpx.Client, path: str, field: str, value: Any
) -> None:
    answer = ask(http, path, **{field: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field
    assert engine.all(Submit) == []


def test_every_field_without_effect_is_looked_at() -> None:
    assert CompletionRequest.no_effect_fields == {*SENT, "guided_decoding_backend", "reasoning_effort"}
    assert ChatRequest.no_effect_fields == {*SENT, "guided_decoding_backend"}


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "refusal": "I would rather not",
    "annotations": [{"type": "url_citation"}],
    "parsed": {"a": 1},
    "cache_control": {"type": "ephemeral"},
}


@pytest.mark.parametrize("field", MESSAGE)
def test_a_messages_fields_without_effect(engine: FakeEngine, http: httpx.Client, field: str) -> None:
    plain = {"role": "assistant", "content": "hi"}
    assert ignored(said(http, USER, plain)) == []
    assert ignored(said(http, USER, plain | {field: MESSAGE[field]}, USER | {field: MESSAGE[field]})) == [
        f"messages.{field}"
    ]
    first, second = engine.all(Submit)
    assert second.prompt[: len(first.prompt) - 10] == first.prompt[:-10]
    if field != "parsed":  # which may be anything
        assert said(http, USER, plain | {field: 5}).status_code == 400


def test_what_a_stream_makes_of_tool_calls_can_be_sent_back(engine: FakeEngine, http: httpx.Client) -> None:
    function = {"name": "f", "arguments": '{"x": 5}', "parsed_arguments": {"x": 5}}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    answer = said(http, USER, {"role": "assistant", "tool_calls": [call]})
    assert ignored(answer) == ["messages.tool_calls.index", "messages.tool_calls.function.parsed_arguments"]
    assert said(http, USER, {"role": "assistant", "tool_calls": [call | {"index": "0"}]}).status_code == 400


def test_parts_of_a_message(engine: FakeEngine, http: httpx.Client) -> None:
    cached = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {}}
    answer = said(http, USER | {"content": [cached, cached]})
    assert ignored(answer) == ["messages.content.cache_control", "messages.content.prompt_cache_breakpoint"]
    assert "user: hello\nhello\n" in prompt_of(engine)
    for wrong in ({"cache_control": "ephemeral"}, {"cache_contrl": {}}, {"refusal": "no"}):
        refused = said(http, USER | {"content": [{"type": "text", "text": "hello"} | wrong]})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "messages[0].content")
        assert next(iter(wrong)) in error_of(refused)["message"]
    assert (
        "did you mean cache_control?"
        in said(http, USER | {"content": [{"type": "text", "text": "hello", "cache_contrl": {}}]}).text
    )


@pytest.mark.parametrize(
    ("content", "result"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], '{"type": "image_url", ...}'),
        ([{"type": "text"}], '{"type": "text"}'),
        (["hello"], '"hello"'),
        ({"type": "text", "text": "hello"}, '{"type": "text", "text": "hello"}'),
    ],
)
def test_content_that_is_none_is_named(engine: FakeEngine, http: httpx.Client, content: Any, result: str) -> None:
    assert error_of(said(http, USER | {"content": content}))["message"].endswith(f", not {result}")


def test_a_refusal_is_what_the_assistant_said(engine: FakeEngine, http: httpx.Client) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not"}]}
    assert ignored(said(http, USER, refusal, USER)) == []
    assert "assistant: I would rather not\n" in prompt_of(engine)


# ---------------------------------------------------------------- with an effect
def test_unsupported_fields_say_so(engine: FakeEngine, http: httpx.Client, ignorant: httpx.Client) -> None:
    """Also where unknown fields are ignored: these are known."""
    sent: dict[str, Any] = {
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "audio": {"voice": "alloy"},
        "modalities": ["text", "audio"],
        "moderation": {"model": "omni-moderation-latest"},
        "web_search_options": {},
    }
    for client in (http, ignorant):
        for field, value in sent.items():
            answer = ask(client, "/v1/chat/completions", **{field: value})
            assert (answer.status_code, error_of(answer)["param"]) == (400, field)
            assert "not supported" in error_of(answer)["message"]
        for field, value in {"prefix": True, "audio": {"id": "a"}, "function_call": {"name": "f"}}.items():
            answer = said(client, USER, {"role": "assistant", "content": "hi", field: value})
            assert (answer.status_code, error_of(answer)["param"]) == (400, f"messages[1].{field}")
            assert "not supported" in error_of(answer)["message"]
    assert ask(http, "/v1/chat/completions", functions=[], function_call="none", audio=None).is_success
    assert said(http, USER, {"role": "assistant", "content": "hi", "prefix": False}).is_success


@pytest.fixture(scope="module")
def reasoning() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """A model whose template reads what is said of reasoning."""
    template = ChatTemplate(
        {
            "default": "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}): {{ m.content }}\n{% endfor %}"
            "effort {{ reasoning_effort }}"
        },
        {},
    )
    with (
        running_api(Tokenizer(byte_level(), template)) as api,
        FakeEngine(api.socket_path, generates([100])) as engine,
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client, engine


def test_reasoning_effort_is_for_the_chat_template(reasoning: tuple[httpx.Client, FakeEngine]) -> None:
    client, engine = reasoning
    for body, effort in (
        ({}, ""),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
    ):
        assert ignored(ask(client, "/v1/chat/completions", **body)) == []
        assert prompt_of(engine).endswith(f"effort {effort}")
        result = client.post("/tokenize", json={"messages": [USER]} | body)
        assert result.json()["tokens"] == engine.all(Submit)[-1].prompt
    assert ask(client, "/v1/chat/completions", reasoning_effort=5).status_code == 400
    assert ignored(ask(client, "/v1/completions", reasoning_effort="low")) == ["reasoning_effort"]


def test_reasoning_is_another_name_of_reasoning_content(reasoning: tuple[httpx.Client, FakeEngine]) -> None:
    client, engine = reasoning
    for field in ("reasoning", "reasoning_content"):
        assert ignored(said(client, USER, {"role": "assistant", "content": "hi", field: "well"})) == []
        assert "assistant(well): hi" in prompt_of(engine)


# ---------------------------------------------------------------- unknown
@pytest.fixture(scope="module")
def ignorant() -> Iterator[httpx.Client]:
    """A server that ignores unknown fields."""
    with (
        running_api(unknown_fields="ignore") as api,
        FakeEngine(api.socket_path, generates([100])),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "temperature"),
    ({"max_token": 1}, "max_token", "max_tokens"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    (
        {"speculative_config": {"num_speculative_tokens": 1, "promt_lookup_max": 2}},
        "speculative_config.promt_lookup_max",
        "prompt_lookup_max",
    ),
    ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents", "content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}, "nam": 1}}]}]},
        "messages[0].tool_calls[0].function.nam",
        "name",
    ),
]


@pytest.mark.parametrize(("body", "param", "meant"), UNKNOWN, ids=str)
def test_an_unknown_field_is_refused_with_what_was_meant(
    engine: FakeEngine, http: httpx.Client, ignorant: httpx.Client, body: dict[str, Any], param: str, meant: str
) -> None:
    paths = ["/v1/chat/completions"] if "messages" in body else [*PATHS]
    for path in paths:
        answer = ask(http, path, **body)
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == param
        assert f"{param} is not a parameter of this endpoint; did you mean {meant}?" in error["message"]
        names = ignored(ask(ignorant, path, **body))
        assert names == [param.replace("[0]", "")]


def test_unlike_any_field(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    message = error_of(ask(http, path, xyzzy=1))["message"]
    assert message == "xyzzy is not a parameter of this endpoint; remove it"


def test_several_unknown_fields_are_named(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    message = error_of(ask(http, path, temprature=1, top_l=5, n=0))["message"]
    assert "did you mean temperature?" in message
    assert "did you mean top_" in message
    assert "n: should be 1 or more" in message


def test_names_that_a_client_made_up_are_quoted(ignorant: httpx.Client, path: str) -> None:
    names = ["a b", "x\r\nSet-Cookie: a=b", "schlüssel", "a,b", "n" * 500]
    result = ignored(ask(ignorant, path, **dict.fromkeys(names, 1)))
    assert result == [
        "a%20b",
        "x%0D%0ASet-Cookie%3A%20a%3Db",
        "schl%C3%BCssel",
        "a%2Cb",
        "n" * MAX_REPORTED_NAME_LENGTH,
    ]
    many = ignored(ask(ignorant, path, **{f"field{i}": i for i in range(80)}))
    assert many == [*(f"field{i}" for i in range(MAX_REPORTED_NAMES)), "..."]


def test_known_fields_are_checked_all_the_same(ignorant: httpx.Client, path: str) -> None:
    for field, value in (("temperature", 9), ("user", 5), ("metadata", [])):
        answer = ask(ignorant, path, **{field: value, "unknown": 1})
        assert (answer.status_code, error_of(answer)["param"]) == (400, field)


def test_other_routes_ignore_them_too_but_for_the_administration(ignorant: httpx.Client) -> None:
    """There a misspelt salt would clear everything."""
    assert ignored(ignorant.post("/tokenize", json={"prompt": "x", "unknown": 1})) == ["unknown"]
    part = {"type": "text", "text": "hello", "unknown": 1}
    answer = ignorant.post("/tokenize", json={"messages": [USER | {"content": [part]}]})
    assert ignored(answer) == ["messages.content.unknown"]
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    refused = ignorant.post("/v1/kv_cache/paged/clear", json={"cache_slat": "x"}, headers=headers)
    assert refused.status_code == 400
    assert "did you mean cache_salt?" in error_of(refused)["message"]


# ---------------------------------------------------------------- lists
@pytest.mark.parametrize("prompt", [[[1], "a"], ["a", [1]], [[1], 2], [1, [2]], ["a", 1], [1, "a"], [[1], ["a"]], [{}]])
def test_a_list_of_prompts_is_of_one_kind(engine: FakeEngine, http: httpx.Client, prompt: list[Any]) -> None:
    answer = ask(http, "/v1/completions", prompt=prompt)
    assert answer.status_code == 400
    assert str(error_of(answer)["param"]).startswith("prompt")
    assert engine.all(Submit) == []
