"""POST /v1/completions as clients see it: openai-python, and plain HTTP where that hides something."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server.api.openai.completions import CompletionRequest
from server.engine.ipc.messages import Cancel, Failed, FromEngine, SamplingParams, Submit, Tokens
from tests.api.fake_engine import FakeEngine, admitted, generates
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of
from tests.text.tiny_tokenizers import BOS, EOS, byte_level


def tokens_up_to(text: str, ids: list[int]) -> int:
    backend = byte_level()
    return next(count for count in range(len(ids) + 1) if text in backend.decode(ids[:count]))


# ---------------------------------------------------------------- whole answers
def test_completion(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    completion = openai_client.completions.create(model="tiny", prompt="hello")
    assert completion.id.startswith("cmpl-")
    assert (completion.object, completion.model) == ("text_completion", "tiny")
    (choice,) = completion.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hello world", "length", None)
    prompt, tokens = [BOS, *encode("hello")], encode("hello world")
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(tokens))
    assert usage.total_tokens == len(prompt) + len(tokens)
    (submit,) = engine.all(Submit)
    assert submit.prompt == prompt
    assert engine.all(Cancel) == []


def test_the_response_has_cached_tokens_and_the_strategy(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    engine.script = generates(encode("hello"), cached_tokens=3)
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": [1, 2, 3, 4], "kv_cache": "short"})
    completion = response.json()
    assert response.headers["x-kv-cache"] == "short"
    assert completion["kv_cache"] == {"instance": "short", "reason": "default", "cached_tokens": 3}
    assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert engine.all(Submit)[0].prompt == [1, 2, 3, 4]


def test_sampling_parameters_reach_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    sent = {"max_tokens": 5, "temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    assert http.post("/v1/completions", json=VALID_REQUEST | sent | {"priority": -2}).is_success
    (submit,) = engine.all(Submit)
    assert submit.sampling == SamplingParams(5, 0, 7, 0.5, 0.1, 3, True)
    assert submit.priority == -2


def test_defaults(engine: FakeEngine, http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post("/v1/completions", json=VALID_REQUEST).is_success
    first, second = (submit.sampling for submit in engine.all(Submit))
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p, first.min_p) == (16, 1.0, 0, 1.0, 0.0)
    assert first.seed != second.seed


@pytest.mark.parametrize("stream", [False, True])
def test_null_is_absent(engine: FakeEngine, http: httpx.Client, stream: bool) -> None:
    nulls = dict.fromkeys(set(CompletionRequest.model_fields) - {"model", "prompt"})
    assert http.post("/v1/completions", json=VALID_REQUEST | nulls | {"stream": stream}).is_success


def test_neutral_and_meaningless_values_are_accepted(engine: FakeEngine, http: httpx.Client) -> None:
    sent: dict[str, Any] = {"echo": False, "suffix": "", "logit_bias": {}, "frequency_penalty": 0, "top_k": -1, "n": 2}
    sent |= {"presence_penalty": 0.0, "repetition_penalty": 1, "best_of": 2, "stop": [], "user": "me", "store": True}
    sent |= {"metadata": {"a": "b"}, "response_format": {"type": "text"}, "min_tokens": 0, "safety_identifier": "x"}
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": ["x"], **sent}).is_success
    assert engine.all(Submit)[0].sampling.top_k == 0


def test_n(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    def script(submit: Submit) -> list[list[FromEngine]]:
        index = submit.request_id[-1]
        return [[admitted(submit), Tokens(submit.request_id, encode(f"n{index}"), "length")]]

    engine.script = script
    completion = openai_client.completions.create(model="tiny", prompt=[5, 6], n=3, seed=2**63 - 2)
    assert [(choice.index, choice.text) for choice in completion.choices] == [(0, "n0"), (1, "n1"), (2, "n2")]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 6)
    submits = engine.all(Submit)
    assert [submit.sampling.seed for submit in submits] == [2**63 - 2, 2**63 - 1, 0]
    key = completion.id.removeprefix("cmpl-")
    assert [submit.request_id for submit in submits] == [f"{key}-0-{index}" for index in range(3)]


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode, as_list: bool) -> None:
    engine.script = generates(encode("hello world hello"), None)
    completion = openai_client.completions.create(model="tiny", prompt="x", stop=["zz", "o w"] if as_list else "o w")
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("hell", "stop")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == tokens_up_to("o w", encode("hello world"))
    assert engine.wait_for(Cancel)[0].request_id == engine.all(Submit)[0].request_id


def test_the_end_of_sequence_token_counts_and_has_no_text(
    engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode
) -> None:
    engine.script = generates([*encode("hello"), EOS], "stop")
    completion = openai_client.completions.create(model="tiny", prompt="x")
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("hello", "stop")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(encode("hello")) + 1


# ---------------------------------------------------------------- choice of strategy
@pytest.mark.parametrize("has_model_name", [False, True])
@pytest.mark.parametrize("has_header", [False, True])
@pytest.mark.parametrize("has_field", [False, True])
def test_the_body_names_the_strategy_else_the_header_else_the_models_name(
    engine: FakeEngine, http: httpx.Client, has_field: bool, has_header: bool, has_model_name: bool
) -> None:
    body = {"model": "tiny:short" if has_model_name else "tiny", "prompt": "x"} | (
        {"kv_cache": "one"} if has_field else {}
    )
    completion = http.post("/v1/completions", json=body, headers={"X-KV-Cache": "two"} if has_header else {}).json()
    ways = [(has_field, "one", "request"), (has_header, "two", "header"), (has_model_name, "short", "model")]
    expected = next(((name, place) for is_used, name, place in ways if is_used), None)
    (submit,) = engine.all(Submit)
    assert (submit.kv_cache and (submit.kv_cache, submit.named_by)) == expected
    assert completion["model"] == body["model"]


# ---------------------------------------------------------------- streams
def test_stream(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    stream = openai_client.completions.create(model="tiny", prompt="x", stream=True)
    received = list(stream)
    assert "".join(chunk.choices[0].text for chunk in received) == "hello world"
    assert [chunk.choices[0].finish_reason for chunk in received] == [None] * (len(received) - 1) + ["length"]
    assert len({chunk.id for chunk in received}) == 1
    assert len(received) == len(encode("hello world"))
    assert engine.all(Cancel) == []


def test_stream_without_usage_has_no_usage_field(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=VALID_REQUEST | {"stream": True})
    received = chunks_of(response)
    assert all("usage" not in chunk for chunk in received)
    assert response.headers["x-kv-cache"] == "paged"
    assert received[0]["kv_cache"] == {"instance": "paged", "reason": "default", "cached_tokens": 0}
    assert all("kv_cache" not in chunk for chunk in received[1:])


def test_stream_with_usage(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    body = {"model": "tiny", "prompt": [1], "stream": True, "stream_options": {"include_usage": True}}
    *received, last = chunks_of(http.post("/v1/completions", json=body))
    assert all(chunk["usage"] is None for chunk in received)
    assert last["choices"] == []
    n = len(encode("hello world"))
    assert last["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": n,
        "total_tokens": 1 + n,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_of_several_choices(engine: FakeEngine, http: httpx.Client) -> None:
    received = chunks_of(http.post("/v1/completions", json=VALID_REQUEST | {"stream": True, "n": 3}))
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in received if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "hello world"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


def test_stream_begins_while_other_choices_wait_for_a_place(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    a, b, c = encode("abc")

    def script(submit: Submit) -> list[list[FromEngine]]:
        return [] if submit.request_id.endswith("-1") else [[admitted(submit), Tokens(submit.request_id, [a])]]

    engine.script = script
    with http.stream("POST", "/v1/completions", json=VALID_REQUEST | {"stream": True, "n": 2}) as got:
        lines = got.iter_lines()
        assert next(lines).startswith("data: {")
        first, second = engine.all(Submit)
        engine.send(Tokens(first.request_id, [b], "length"))
        engine.send(admitted(second), Tokens(second.request_id, [c], "length"))
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert engine.all(Cancel) == []


def test_stream_never_shows_a_stop_string(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = generates(encode("hello world hello"), None)
    body = VALID_REQUEST | {"stream": True, "stop": ["world", "lo wa"]}
    received = chunks_of(http.post("/v1/completions", json=body))
    text = ""
    for chunk in received:
        text += chunk["choices"][0]["text"]
        assert "hello ".startswith(text)
    assert text == "hello "
    assert received[-1]["choices"][0]["finish_reason"] == "stop"
    engine.wait_for(Cancel)


def test_stream_shows_whole_characters(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = generates(encode("\u2603\U0001f600"))
    received = chunks_of(http.post("/v1/completions", json=VALID_REQUEST | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in received] == ["\u2603", "\U0001f600"]


def test_chunks_of_a_stream_differ_in_their_text_only(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    text = 'a "b" \\ \0 \n\n data: [DONE] </s'
    engine.script = generates(encode(text))
    received = chunks_of(http.post("/v1/completions", json=VALID_REQUEST | {"stream": True, "n": 2}))
    for index in range(2):
        first, *others, last = (chunk for chunk in received if chunk["choices"][0]["index"] == index)
        assert "".join(chunk["choices"][0].pop("text") for chunk in (first, *others, last)) == text
        assert first["choices"] == others[0]["choices"]
        assert all(chunk == others[0] for chunk in others)
        assert last == others[0] | {"choices": [others[0]["choices"][0] | {"finish_reason": "length"}]}


def test_stream_of_tokens_that_come_together(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    ids = encode("hello world")

    def script(submit: Submit) -> list[list[FromEngine]]:
        tokens = [Tokens(submit.request_id, [token]) for token in ids]
        return [[admitted(submit), *tokens, Failed(submit.request_id, 500, "it broke")]]

    engine.script = script
    *received, error = chunks_of(http.post("/v1/completions", json=VALID_REQUEST | {"stream": True}))
    assert len(received) == len(ids), "one event for each, however they are sent"
    assert "".join(chunk["choices"][0]["text"] for chunk in received) == "hello world"
    assert error["error"]["message"] == "it broke"


def test_stream_answers_as_tokens_come(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = generates([], None)
    with http.stream("POST", "/v1/completions", json=VALID_REQUEST | {"stream": True}) as response:
        assert response.status_code == 200  # before the first token
        lines = response.iter_lines()
        (submit,) = engine.wait_for(Submit)
        for token, finish_reason in zip(encode("abc"), (None, None, "length"), strict=True):
            engine.send(Tokens(submit.request_id, [token], finish_reason))
            assert next(lines).startswith("data: {")
            assert next(lines) == ""
        assert next(lines) == "data: [DONE]"
