"""/tokenize, /detokenize, /apply-template, /tokenizer_info, /version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from server.version import get_version
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine
from tests.api.payloads import Encode, error_of
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import BOS, byte_level

USER = {"role": "user", "content": "hello"}
BOTH_WAYS = {"continue_final_message": True, "add_generation_prompt": True}


def tokens_of(http: httpx.Client, body: dict[str, Any]) -> list[int]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert (result["count"], result["max_model_len"]) == (len(result["tokens"]), 256)
    return list(result["tokens"])


def test_a_prompt(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    plain = encode("hello world")
    assert tokens_of(http, {"prompt": "hello world"}) == [BOS, *plain]
    assert tokens_of(http, {"model": "tiny:short", "prompt": "hello world", "add_special_tokens": False}) == plain
    assert tokens_of(http, {"prompt": "", "messages": None}) == [BOS]
    assert tokens_of(http, {"prompt": "hello " * 2000}) == [BOS, *encode("hello " * 2000)]  # longer than the context


def test_token_strings(engine: FakeEngine, http: httpx.Client) -> None:
    result = http.post("/tokenize", json={"prompt": "hello \u2603", "return_token_strs": True}).json()
    assert result["token_strs"] == byte_level().encode("hello \u2603").tokens
    assert http.post("/tokenize", json={"prompt": "hello"}).json()["token_strs"] is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "<s>user: hello\nassistant:"),
        ({"add_generation_prompt": False}, "<s>user: hello\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<s>user: hello"),
        ({"add_special_tokens": True}, "<s><s>user: hello\nassistant:"),
        ({"chat_template_kwargs": {"loud": True}}, "<s>user: hello\n!assistant:"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]},
            "<s>user: a\nb\nassistant:",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}, USER]},
            "<s>user: hello\nassistant: \nuser: hello\nassistant:",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                            for arguments in ('{"x": "one"}', {"x": "two"}, "")
                        ],
                    }
                ]
            },
            "<s>assistant: onetwo\nassistant:",
        ),
    ],
    ids=str,
)
def test_messages(engine: FakeEngine, http: httpx.Client, encode: Encode, body: dict[str, Any], text: str) -> None:
    tokens = tokens_of(http, {"messages": [USER]} | body)
    assert tokens == encode(text)
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_detokenize(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    for text in ("hello world", "", "caf\u00e9 \u2603"):
        answer = http.post("/detokenize", json={"model": "tiny", "tokens": encode(text)})
        assert answer.json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": [319]}).json() == {"prompt": ""}  # no token, but the model has it


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "more": 1}, "more"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("/tokenize", {"messages": [USER | {"mood": "good"}]}, "messages[0].mood"),
        ("/tokenize", {"messages": [USER], **BOTH_WAYS}, "continue_final_message"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, 320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
    ],
)
def test_refused(engine: FakeEngine, http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["message"].startswith(param.partition("[")[0])


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content"),
        ([{"type": "text"}], "messages[0].content"),
        (5, "messages[0].content"),
    ],
    ids=str,
)
def test_content_that_is_no_text(engine: FakeEngine, http: httpx.Client, content: Any, param: str) -> None:
    response = http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith(param)


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "[" * 10**5])
def test_arguments_that_are_no_object_are_empty(engine: FakeEngine, http: httpx.Client, arguments: str) -> None:
    """A model wrote them; the conversation goes on with the prompt of a call without arguments."""
    responses = [_tokenize_call(http, each) for each in (arguments, "{}")]
    assert [response.status_code for response in responses] == [200, 200]
    assert responses[0].json() == responses[1].json()


def test_arguments_that_are_no_text_are_refused(engine: FakeEngine, http: httpx.Client) -> None:
    response = _tokenize_call(http, 5)
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages[0].tool_calls[0].function.arguments"


def _tokenize_call(http: httpx.Client, arguments: Any) -> httpx.Response:
    call = {"function": {"name": "f", "arguments": arguments}}
    return http.post("/tokenize", json={"messages": [{"role": "assistant", "tool_calls": [call]}]})


def test_what_the_template_does_not_take(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.post("/tokenize", json={"messages": [{"role": "cat", "content": "x"}]})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith("messages")
    assert "no cats" in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    body = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}[path]
    response = http.post(path, json=body | {"model": "other"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_version(lone_api: Api) -> None:
    assert httpx.get(f"{lone_api.url}/version", timeout=PATIENCE).json() == {"version": get_version()}
    assert httpx.post(f"{lone_api.url}/tokenize", json={"prompt": "x"}, timeout=PATIENCE).status_code == 503


# ---------------------------------------------------------------- the template, and what the tokenizer is
def test_the_prompt_that_messages_become(engine: FakeEngine, http: httpx.Client) -> None:
    said = {"messages": [USER, {"role": "assistant", "content": "well"}]}
    for more, end in (
        ({}, "assistant: well\nassistant:"),
        ({"continue_final_message": True}, "assistant: well"),
        ({"model": "tiny", "max_tokens": 5, "temperature": 0, "stream": True}, "assistant: well\nassistant:"),
        ({"chat_template_kwargs": {"loud": True}}, "assistant: well\n!assistant:"),
    ):
        answer = http.post("/apply-template", json=said | more)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"prompt": f"<s>user: hello\n{end}"}
    assert engine.received == []


def test_a_template_is_applied_to_messages_alone(engine: FakeEngine, http: httpx.Client) -> None:
    for body, param in (({}, "messages"), ({"messages": [USER], "model": "other"}, "model")):
        assert error_of(http.post("/apply-template", json=body))["param"] == param


def test_tokenizer_info_is_off_by_default(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").status_code == 404


def test_tokenizer_info(tmp_path: Path) -> None:
    """The response has what transformers' own tokenizer reports, as vLLM's has."""
    backend = byte_level()
    backend.save(str(tmp_path / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "</s>"}
    written |= {"added_tokens_decoder": {"0": bos}, "model_max_length": 99, "vocab_file": "/home/me/vocab.txt"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with running_api(model=str(tmp_path), enable_tokenizer_info_endpoint=True) as api:
        result = httpx.get(f"{api.url}/tokenizer_info", timeout=PATIENCE).json()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for name in ("bos_token", "eos_token", "chat_template", "model_max_length"):
        assert result[name] == getattr(theirs, name)
    assert result["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert result["added_tokens_decoder"] == {"0": "<s>"}
    assert "vocab_file" not in result
