"""POST /v1/chat/completions as openai-python sees it: messages in, a message out, whole or in deltas."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server.engine.ipc.messages import Explained, FromEngine, Submit, Tokens
from tests.api.fake_engine import FakeEngine, admitted, generates, scores
from tests.api.openai.test_kv_cache_fields import RECORD
from tests.api.payloads import Encode, chunks_of, error_of
from tests.text.tiny_tokenizers import EOS, byte_level

BACKEND = byte_level()
MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
PROMPT = "<s>system: be kind\nuser: hello\nassistant:"


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES} | body)


def test_a_chat(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    engine.script = generates([*encode("hello world"), EOS], "stop", cached_tokens=2)
    result = openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert result.id.startswith("chatcmpl-")
    assert result.object == "chat.completion"
    (choice,) = result.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
    assert (choice.finish_reason, choice.logprobs, choice.message.refusal) == ("stop", None, None)
    (submit,) = engine.all(Submit)
    assert submit.prompt == BACKEND.encode(PROMPT, add_special_tokens=False).ids
    assert submit.sampling.max_tokens == 256 - len(submit.prompt), "up to the context's end"
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(submit.prompt)
    assert result.usage.completion_tokens == len(encode("hello world")) + 1
    assert result.usage.prompt_tokens_details is not None
    assert result.usage.prompt_tokens_details.cached_tokens == 2


def test_in_deltas(engine: FakeEngine, openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="tiny:short", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
    )
    *received, last = list(stream)
    for index in range(2):
        deltas = [c.choices[0].delta for c in received if c.choices[0].index == index]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert deltas[0].content == "", "the role alone"
        assert deltas[-1].to_dict() == {}, "how it ended alone"
        assert "".join(delta.content or "" for delta in deltas) == "hello world"
    assert {chunk.object for chunk in received} == {"chat.completion.chunk"}
    assert [c.choices[0].finish_reason for c in received if c.choices[0].finish_reason] == ["length"] * 2
    assert last.choices == []
    assert last.usage is not None
    assert engine.all(Submit)[0].kv_cache == "short"


def test_logprobs(engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode) -> None:
    engine.script = scores(encode("hi \u2603"))
    result = openai_client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
    logprobs = result.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == "hi \u2603"
    assert all(token.logprob == -0.5 for token in logprobs.content)
    assert all([t.token for t in token.top_logprobs] == [token.token] for token in logprobs.content)
    assert engine.all(Submit)[0].sampling.logprobs == 1


def test_tokens_may_be_named_by_their_ids(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("hi"))
    result = ask(http, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert [token["token"] for token in result["content"]] == [f"token_id:{token}" for token in encode("hi")]
    assert all(token["top_logprobs"][0]["token"] == token["token"] for token in result["content"])
    assert b"".join(bytes(token["bytes"]) for token in result["content"]) == b"hi"


def test_a_stream_has_the_logprobs_of_its_deltas(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = scores(encode("hello"))
    opening, *received, closing = chunks_of(ask(http, stream=True, logprobs=True))
    assert [chunk["choices"][0]["logprobs"] for chunk in (opening, closing)] == [None, None]
    for chunk in received:
        (choice,) = chunk["choices"]
        result = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert result == choice["delta"]["content"]


def test_fields_of_the_prompt_are_sent_once(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    """At the top level, as in vLLM; of a stream in its first chunk."""
    engine.script = scores(encode("hi"))
    wanted = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    ids = BACKEND.encode(PROMPT, add_special_tokens=False).ids
    whole = ask(http, **wanted).json()
    first, *others = chunks_of(ask(http, **wanted, stream=True))
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == ids
    assert whole["prompt_logprobs"] == first["prompt_logprobs"]
    assert [None, *([str(token)] for token in ids[1:])] == [
        result and list(result) for result in whole["prompt_logprobs"]
    ]
    for part in (*whole["choices"], *(choice for chunk in (first, *others) for choice in chunk["choices"])):
        assert not {"prompt_token_ids", "prompt_logprobs"} & part.keys()
    assert not any({"prompt_token_ids", "prompt_logprobs"} & chunk.keys() for chunk in others)
    assert [choice["token_ids"] for choice in whole["choices"]] == [encode("hi")] * 2


def test_fields_of_the_prompt_that_were_not_asked_for_are_null(
    engine: FakeEngine, openai_client: openai.OpenAI
) -> None:
    """So clients of vLLM read them; chunks do not have them."""
    result: Any = openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert (result.prompt_logprobs, result.prompt_token_ids, result.choices[0].token_ids) == (None, None, None)


def test_the_first_chunk_has_the_fields_of_the_prompt_whichever_choice_comes_first(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    """The only delta of the first choice waits for its explanation, so that the second choice overtakes it."""
    submits: list[Submit] = []

    def script(submit: Submit) -> list[list[FromEngine]]:
        submits.append(submit)
        frames: list[list[FromEngine]] = [[admitted(submit)], [Tokens(submit.request_id, encode("hi"), "length")]]
        if len(submits) == 2:
            frames += [[Explained(each.request_id, RECORD)] for each in reversed(submits)]
        return frames

    engine.script = script
    chunks = chunks_of(ask(http, stream=True, n=2, explain=True, return_token_ids=True))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 1, 1, 0, 0, 0]
    assert [sorted({"prompt_token_ids", "kv_cache"} & chunk.keys()) for chunk in chunks] == [
        ["kv_cache", "prompt_token_ids"],
        *[[]] * 5,
    ]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None, None] * 2


def test_a_stream_has_role_text_and_end_in_chunks_of_their_own(
    engine: FakeEngine, http: httpx.Client, encode: Encode
) -> None:
    engine.script = generates([*encode("hello"), EOS], "stop")
    wanted = {"stream": True, "return_token_ids": True}
    (opening, *between, closing) = [chunk["choices"][0] for chunk in chunks_of(ask(http, **wanted))]
    assert opening["delta"] == {"role": "assistant", "content": ""}
    assert closing["delta"] == {}
    assert [choice["finish_reason"] for choice in (opening, *between, closing)] == [None] * (len(between) + 1) + [
        "stop"
    ]
    assert "".join(choice["delta"]["content"] for choice in between) == "hello"
    assert all(choice["delta"].keys() == {"content"} for choice in between)
    assert [token for choice in (opening, *between, closing) for token in choice["token_ids"]] == [
        *encode("hello"),
        EOS,
    ]


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_either_name_of_the_limit(engine: FakeEngine, http: httpx.Client, limits: dict[str, int], most: int) -> None:
    assert ask(http, **limits).is_success
    assert engine.all(Submit)[0].sampling.max_tokens == most


def test_an_answer_can_be_sent_back_as_it_came(
    engine: FakeEngine, openai_client: openai.OpenAI, encode: Encode
) -> None:
    engine.script = generates(encode("hi"), "stop")
    first = openai_client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message
    talk = [*MESSAGES, first.model_dump(), {"role": "user", "content": "more"}]
    openai_client.chat.completions.create(model="tiny", messages=talk)
    text = BACKEND.decode(engine.all(Submit)[1].prompt)
    assert text == f"system: be kind\nuser: hello\nassistant: {first.content}\nuser: more\nassistant:"


def test_a_message_may_go_on(engine: FakeEngine, http: httpx.Client) -> None:
    spoken = [*MESSAGES, {"role": "assistant", "content": "well,"}]
    assert ask(http, messages=spoken, add_generation_prompt=False, continue_final_message=True).is_success
    assert BACKEND.decode(engine.all(Submit)[0].prompt).endswith("assistant: well,")


def test_going_on_excludes_a_new_answer(engine: FakeEngine, http: httpx.Client) -> None:
    spoken = [*MESSAGES, {"role": "assistant", "content": "well, "}]
    assert ask(http, messages=spoken, continue_final_message=True, add_generation_prompt=None).is_success
    assert BACKEND.decode(engine.all(Submit)[0].prompt).endswith("assistant: well, ")
    refused = ask(http, messages=spoken, continue_final_message=True, add_generation_prompt=True)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "cat", "content": "miaow"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_completion_tokens": 256}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"functions": [{}]}, "functions"),
        ({"prompt": "x"}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 129}, "n"),
        ({"speculative_config": {"num_speculative_tokens": -1}}, "speculative_config.num_speculative_tokens"),
    ],
)
def test_refused(engine: FakeEngine, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = ask(http, **change)
    assert response.status_code == 400
    assert (error_of(response)["param"] or "").startswith(param)
    assert engine.all(Submit) == []


def test_what_changes_nothing_is_accepted(engine: FakeEngine, http: httpx.Client) -> None:
    sent: dict[str, Any] = {"user": "me", "metadata": {}, "store": True, "service_tier": "auto", "tools": []}
    sent |= {"tool_choice": "auto", "parallel_tool_calls": False, "modalities": ["text"], "logit_bias": None}
    sent |= {"logprobs": False, "top_logprobs": 0}
    assert ask(http, **sent, max_tokens=None, response_format={"type": "text"}).is_success
