"""What clients that people use send, body by body: lm-eval, GuideLLM and others."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import FromEngine, Submit, Tokens
from tests.api.conftest import running_api
from tests.api.fake_engine import FakeEngine, admitted, generates
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of, error_of
from tests.patience import PATIENCE

MESSAGES = [{"role": "user", "content": "hello"}]
HUMAN_EVAL = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert", "\n\n\n", "```"]  # lm-eval has as many
PATHS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": MESSAGES}}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return http.post(path, json={"model": "tiny"} | PATHS[path] | body)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# ---------------------------------------------------------------- stop strings
@pytest.mark.parametrize("stop", HUMAN_EVAL)
def test_nine_stop_strings(engine: FakeEngine, http: httpx.Client, encode: Encode, path: str, stop: str) -> None:
    engine.script = generates(encode(f"    return 1{stop} more"), None)
    answer = ask(http, path, stop=HUMAN_EVAL)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert text_of(choice) == "    return 1"
    assert choice["stop_reason"] == stop


def test_the_setting_limits_the_number_of_stop_strings(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    assert ask(http, path, stop=[str(i) for i in range(64)]).is_success
    refused = ask(http, path, stop=[str(i) for i in range(65)])
    assert (refused.status_code, error_of(refused)["param"]) == (400, "stop")
    assert "65 strings are too many: at most 64" in error_of(refused)["message"]
    with running_api(max_stop_strings=100) as api, FakeEngine(api.socket_path, generates([100])):
        api.await_ready()
        with httpx.Client(base_url=api.url, timeout=PATIENCE) as raised:
            assert ask(raised, path, stop=[str(i) for i in range(100)]).is_success
            assert ask(raised, path, stop=[str(i) for i in range(101)]).status_code == 400


# ---------------------------------------------------------------- usage in a stream
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def test_usage_in_every_chunk(engine: FakeEngine, http: httpx.Client, encode: Encode, path: str) -> None:
    """As GuideLLM asks for it, always."""
    engine.script = generates(encode("hello world"), cached_tokens=1)
    *parts, last = chunks_of(ask(http, path, stream=True, stream_options=OPTIONS))
    count = len(encode("hello world"))
    around = path == "/v1/chat/completions"  # a chunk for the role, and one for the end
    expected = [0] * around + [*range(1, count + 1)] + [count] * around
    assert [part["usage"]["completion_tokens"] for part in parts] == expected
    assert last["choices"] == []
    assert parts[-1]["usage"] == last["usage"]
    for part in parts:
        usage = part["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_usage_of_each_choice(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    """Counted up to the end of a chunk, though several come at once; with the tokens that have no text."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        tokens = encode("hello") * (1 + int(submit.request_id[-1]))
        result: list[FromEngine] = [Tokens(submit.request_id, [token]) for token in tokens[:-1]]
        return [[admitted(submit, 2), *result, Tokens(submit.request_id, [tokens[-1], 1], "stop")]]

    engine.script = script
    body: dict[str, Any] = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "stream": True, "stream_options": OPTIONS}
    *parts, last = chunks_of(http.post("/v1/completions", json=VALID_REQUEST | body))
    one = len(encode("hello"))
    for index, (prompt, tokens) in enumerate([(2, one), (2, 2 * one), (3, one), (3, 2 * one)]):
        usages = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [*range(1, tokens), tokens + 1]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt}
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 2 * (3 * one + 2)


def test_only_with_include_usage(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    """As in vLLM."""
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        assert all("usage" not in part for part in chunks_of(ask(http, path, stream=True, stream_options=options)))


@pytest.mark.parametrize("padded", [True, False])
def test_obfuscation_is_accepted(engine: FakeEngine, http: httpx.Client, path: str, padded: bool) -> None:
    for part in chunks_of(ask(http, path, stream=True, stream_options={"include_obfuscation": padded})):
        assert not part.keys() & {"obfuscation", "usage"}


# ---------------------------------------------------------------- names of the model
@pytest.mark.parametrize("model", [{}, {"model": ""}, {"model": None}], ids=str)
def test_no_name_is_the_served_model(
    engine: FakeEngine, http: httpx.Client, path: str, model: dict[str, str | None]
) -> None:
    for stream in (False, True):
        answer = http.post(path, json=PATHS[path] | model | {"stream": stream})
        assert answer.status_code == 200, answer.text
        result = chunks_of(answer)[0] if stream else answer.json()
        assert result["model"] == "tiny"
    assert [submit.kv_cache for submit in engine.all(Submit)] == [None, None]
    assert http.post("/tokenize", json={"prompt": "x"} | model).status_code == 200


@pytest.fixture(scope="module")
def open_minded() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """A server that takes any name."""
    with (
        running_api(skip_model_name_validation=True) as api,
        FakeEngine(api.socket_path, generates([100])) as engine,
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client, engine


@pytest.mark.parametrize("name", ["dummy", "tgi", "gpt-4", "owner/name:provider", "tiny:other"])
def test_any_model_name_with_the_setting(
    open_minded: tuple[httpx.Client, FakeEngine], engine: FakeEngine, http: httpx.Client, path: str, name: str
) -> None:
    """huggingface_hub sends the first one, TGI's client the second."""
    client, their_engine = open_minded
    their_engine.begin_again(generates([100]))
    answer = ask(client, path, model=name)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert ask(client, path, model="tiny:short").json()["model"] == "tiny:short"
    assert [submit.kv_cache for submit in their_engine.all(Submit)] == [None, "short"]
    assert client.post("/tokenize", json={"prompt": "x", "model": name}).status_code == 200
    assert client.get(f"/v1/models/{name}").status_code == 404
    assert ask(http, path, model=name).status_code == 404


# ---------------------------------------------------------------- fields of responses
def test_every_answer_has_the_system_fingerprint(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    streamed = chunks_of(ask(http, path, stream=True, stream_options=OPTIONS))
    assert {result["system_fingerprint"] for result in (ask(http, path).json(), *streamed)} == {"fp_of_the_fake"}


# ---------------------------------------------------------------- whole bodies
def test_guidellms_bodies(engine: FakeEngine, http: httpx.Client, encode: Encode, path: str) -> None:
    """As its release 0.8 sends them, without a model's name where none was given.

    It is none of tests/clients, as it does not install without torch and CUDA.
    """
    common: dict[str, Any] = {"stream": True, "stream_options": OPTIONS, "stop": None, "ignore_eos": True}
    content = [{"type": "text", "text": "hello"}]
    body = (
        {"max_tokens": 11, "prompt": "hello"}
        if path == "/v1/completions"
        else {"max_completion_tokens": 11, "messages": [{"role": "user", "content": content}]}
    )
    for model in ({}, {"model": "tiny"}):
        answer = http.post(path, json=model | common | body)
        *parts, last = chunks_of(answer)
        assert last["usage"] == parts[-1]["usage"]
        assert last["usage"]["completion_tokens"] == len(encode("hello world"))
        assert "x-ignored-fields" not in answer.headers
    assert [submit.sampling.max_tokens for submit in engine.all(Submit)] == [11, 11]


# ---------------------------------------------------------------- values as other servers take them
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [  # what is sent, and the body that means the same
    ({"top_k": 40.0, "max_tokens": 4.0, "seed": 1.0}, {"top_k": 40, "max_tokens": 4, "seed": 1}),
    (
        {"stop_token_ids": [4.0], "allowed_token_ids": [5.0, 6], "seed": 1},
        {"stop_token_ids": [4], "allowed_token_ids": [5, 6], "seed": 1},
    ),
    ({"stop": "", "seed": 1}, {"stop": [], "seed": 1}),
    ({"stop": ["a", ""], "seed": 1}, {"stop": ["a"], "seed": 1}),
    ({"stop": None, "seed": 1}, {"seed": 1}),
    ({"seed": 2**64 - 1}, {"seed": 2**63 - 1}),
]


@pytest.mark.parametrize(("sent", "same"), TAKEN)
def test_values_that_clients_send(
    engine: FakeEngine, http: httpx.Client, path: str, sent: dict[str, Any], same: dict[str, Any]
) -> None:
    for body in (sent, same):
        assert ask(http, path, **body).is_success
    first, second = engine.all(Submit)
    assert first.sampling == second.sampling


def test_token_ids_may_be_written_as_5_0(engine: FakeEngine, http: httpx.Client) -> None:
    for prompt in ([5.0, 6], [[5.0], [6, 7.0]]):
        assert ask(http, "/v1/completions", prompt=prompt).is_success
    assert [list(submit.prompt) for submit in engine.all(Submit)] == [[5, 6], [5], [6, 7]]
    assert all(type(token) is int for submit in engine.all(Submit) for token in submit.prompt)
    texts = [http.post("/detokenize", json={"tokens": tokens}).json() for tokens in ([50, 51], [50.0, 51])]
    assert texts[0] == texts[1]


def test_a_seed_of_minus_one_is_random(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    for _ in range(4):
        assert ask(http, path, seed=-1).is_success
    assert len({submit.sampling.seed for submit in engine.all(Submit)}) == 4


CHAT_TOKENS = ("/v1/chat/completions", "max_completion_tokens")


@pytest.mark.parametrize(("path", "name"), [*((path, "max_tokens") for path in PATHS), CHAT_TOKENS])
def test_minus_one_tokens_are_as_many_as_fit(engine: FakeEngine, http: httpx.Client, path: str, name: str) -> None:
    assert ask(http, path, **{name: -1}).is_success
    (submit,) = engine.all(Submit)
    assert submit.sampling.max_tokens == 256 - len(submit.prompt)


def test_several_prompts_share_what_fits_behind_the_longest(engine: FakeEngine, http: httpx.Client) -> None:
    assert ask(http, "/v1/completions", prompt=[[5] * 10, [5] * 200], max_tokens=-1).is_success
    assert [submit.sampling.max_tokens for submit in engine.all(Submit)] == [56, 56]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "json_schema", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"type": "json_object", "schema": {}}, {"type": "json_object"}),
]


@pytest.mark.parametrize(("sent", "same"), FORMS)
def test_forms_of_response_formats(
    engine: FakeEngine, http: httpx.Client, path: str, sent: dict[str, Any], same: dict[str, Any]
) -> None:
    for form in (sent, same):
        assert ask(http, path, response_format=form).is_success
    first, second = engine.all(Submit)
    assert first.grammar == second.grammar is not None


# ---------------------------------------------------------------- what clients do to JSON
HALVES = {
    r"\ud83d": 1,
    r"\ude00": 1,
    r"\ude00\ud83d": 2,
    r"\uD83Db": 1,
    r"\\ud83d": 0,
    r"\ud83d\ude00": 0,
    r"\\\ud83d": 1,
}


@pytest.mark.parametrize(("written", "halves"), HALVES.items())
def test_half_a_surrogate_pair_is_a_replacement_character(
    engine: FakeEngine, http: httpx.Client, encode: Encode, written: str, halves: int
) -> None:
    raw = f'{{"prompt": "caf\u00e9 {written}", "add_special_tokens": false}}'.encode()
    answer = http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.is_success, answer.text
    text = json.loads(raw)["prompt"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert text.count("\ufffd") == halves
    (submit,) = engine.all(Submit)
    assert submit.prompt == encode(text)


def test_a_byte_order_mark_before_json_is_ignored(engine: FakeEngine, http: httpx.Client) -> None:
    raw = codecs.BOM_UTF8 + b'{"prompt": "x"}'
    assert http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"}).is_success
    assert engine.all(Submit)


def test_a_compressed_body_is_answered_with_what_is_accepted(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "without Content-Encoding" in error_of(answer)["message"]
