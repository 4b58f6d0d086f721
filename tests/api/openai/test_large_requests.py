"""Much asked at once costs little, and is refused where it would cost others their turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.api.http.errors import ApiError
from server.api.openai import responses
from server.api.openai.generation_job import MAX_LOGPROBS, PromptTokens, check_num_logprobs
from server.api.openai.tokenize import MAX_DECODED_TOKENS
from server.engine.ipc.messages import SamplingParams, Submit
from server.text.tokenizer import Tokenizer
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, generates, scores
from tests.api.payloads import Encode, error_of
from tests.patience import PATIENCE
from tests.text.tiny_tokenizers import byte_level

COMPLETIONS, CHATS, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [[""]] * 1000}),
        (COMPLETIONS, {"prompt": [5, *[True] * 1000]}),
        (CHATS, {"messages": [1] * 1000}),
        (CHATS, {"messages": [{}] * 1000}),
        (CHATS, {"messages": [USER | {"content": [{"type": "audio"}] * 1000}]}),
        (CHATS, {"messages": [USER | {"tool_calls": [1] * 1000}]}),
        (CHATS, {"messages": [USER], "modalities": [1] * 1000}),
        (TOKENIZE, {"messages": [1] * 1000}),
        ("/detokenize", {"tokens": [""] * 1000}),
    ],
)
def test_a_list_is_left_at_the_first_mistake(
    engine: FakeEngine, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """An error for each of a million items takes seconds and gigabytes."""
    answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 400
    assert "more" not in answer.json()["error"]["message"]


def test_the_scores_of_a_prompt_are_written_once(
    engine: FakeEngine, http: httpx.Client, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = scores(encode("ab"))
    written, write = [], responses.make_prompt_logprobs

    def counted(tokenizer: Tokenizer, *args: Any) -> Any:
        written.append(args)
        return write(tokenizer, *args)

    monkeypatch.setattr(responses, "make_prompt_logprobs", counted)
    body = {"model": "tiny", "prompt": [encode("hello world"), encode("you, too")], "n": 3, "prompt_logprobs": 1}
    choices = http.post(COMPLETIONS, json=body).json()["choices"]
    assert len(written) == 2
    assert choices[0]["prompt_logprobs"] == choices[2]["prompt_logprobs"] != choices[3]["prompt_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_long_is_written_beside_the_loop(
    engine: FakeEngine, http: httpx.Client, encode: Encode, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The same answer, in a thread or not."""
    engine.script = scores(encode("hello world"))
    body = {
        "model": "tiny",
        "prompt": "hello",
        "n": 2,
        "logprobs": 1,
        "echo": True,
        "stream": stream,
        "request_id": "1",
    }
    body["stream"] = stream
    plain = http.post(COMPLETIONS, json=body).text
    monkeypatch.setattr(responses, "MAX_INLINE_LOGPROBS", 1)
    assert without_time(http.post(COMPLETIONS, json=body).text) == without_time(plain)


def without_time(answer: str) -> list[str]:
    return [part for part in answer.split(",") if not part.startswith('"created"')]


def test_more_scores_than_an_answer_may_hold() -> None:
    prompts, all_scored = [PromptTokens([5] * 1000, "")], SamplingParams(max_tokens=0, prompt_logprobs=20)
    check_num_logprobs(all_scored, prompts, MAX_LOGPROBS // 21_000)
    with pytest.raises(ApiError, match="too many for one answer"):
        check_num_logprobs(all_scored, prompts, MAX_LOGPROBS // 21_000 + 1)
    with pytest.raises(ApiError, match="too many for one answer"):
        check_num_logprobs(SamplingParams(max_tokens=MAX_LOGPROBS, logprobs=0), prompts, 2)
    check_num_logprobs(SamplingParams(max_tokens=MAX_LOGPROBS, logprobs=5), prompts, 1)


@pytest.fixture(scope="module")
def narrow_api() -> Iterator[Api]:
    """Takes little text, and few requests."""
    with running_api(max_prompt_characters=20, max_num_seqs=2, max_queued_requests=3) as api:
        yield api


@pytest.fixture
def narrow(narrow_api: Api) -> Iterator[httpx.Client]:
    with (
        FakeEngine(narrow_api.socket_path, generates([*byte_level().encode("hello").ids])),
        httpx.Client(base_url=narrow_api.url, timeout=PATIENCE) as client,
    ):
        narrow_api.await_ready()
        yield client


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 21}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * 21]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": "x" * 21}, "suffix"),
        (CHATS, {"messages": [USER | {"content": "x" * 21}]}, "messages"),
        (TOKENIZE, {"prompt": "x" * 21}, "prompt"),
        (TOKENIZE, {"messages": [USER | {"content": "x" * 21}]}, "messages"),
        (COMPLETIONS, {"prompt": "x", "n": 6}, "n"),  # of which one could never be taken
    ],
)
def test_more_than_this_server_takes(narrow: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = narrow.post(path, json={"model": "tiny"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert narrow.post(COMPLETIONS, json={"model": "tiny", "prompt": "x" * 20, "n": 5}).status_code == 200


# ---------------------------------------------------------------- long texts
def test_a_text_that_is_cut_may_be_longer(engine: FakeEngine, http: httpx.Client) -> None:
    for path, text in ((COMPLETIONS, {"prompt": "x" * 9999}), (CHATS, {"messages": [USER | {"content": "x" * 9999}]})):
        body = {"model": "tiny", "truncate_prompt_tokens": 5} | text
        assert http.post(path, json=body).status_code == 200
    assert [len(submit.prompt) for submit in engine.all(Submit)] == [5, 5]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["x" * 17] * 5}, "prompt"),
        (CHATS, {"messages": [USER | {"content": "x" * 7}] * 3}, "messages"),
        (CHATS, {"messages": [USER | {"content": [{"type": "text", "text": "x" * 7}] * 3}]}, "messages"),
        (TOKENIZE, {"messages": [USER | {"reasoning_content": "x" * 20}]}, "messages"),
    ],
)
def test_texts_that_are_too_long_together(narrow: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    error = error_of(narrow.post(path, json={"model": "tiny"} | body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "together" in error["message"]


def test_more_tokens_than_are_decoded(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [5] * MAX_DECODED_TOKENS}).status_code == 200
    error = error_of(http.post("/detokenize", json={"tokens": [5] * (MAX_DECODED_TOKENS + 1)}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "tokens")


# ---------------------------------------------------------------- errors
LONG = "long" * 10**5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {LONG: 1}),
        (COMPLETIONS, {f"{LONG}{i}": 1 for i in range(50)}),
        (COMPLETIONS, {"model": LONG}),
        (COMPLETIONS, {"kv_cache": LONG}),
        (COMPLETIONS, {"stream_options": {LONG: 1}, "stream": True}),
        (COMPLETIONS, {"logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"logit_bias": {str(token): "x" for token in range(1000)}}),
        (COMPLETIONS, {"stop_token_ids": ["x"] * 60_000}),
        (CHATS, {"messages": [{LONG: 1}]}),
        (CHATS, {"messages": [USER], "chat_template_kwargs": {"messages": LONG}}),
        (CHATS, {"messages": [USER], "tools": [LONG]}),
    ],
)
def test_an_error_stays_short(engine: FakeEngine, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code >= 400
    assert len(answer.content) < 2000


def test_so_does_the_message_of_a_template(engine: FakeEngine, http: httpx.Client) -> None:
    messages = [{"role": "parrot", "content": "long"}]
    error = error_of(http.post(CHATS, json={"model": "tiny", "messages": messages}))
    assert error["message"].startswith("messages: the model's chat template does not take these messages: longlong")
    assert len(error["message"]) < 1100
