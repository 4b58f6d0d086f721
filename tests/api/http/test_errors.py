"""Every mistake gets OpenAI's error object, the right status, and the name of the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from server.engine.ipc.messages import Admitted, FromEngine, Submit, Tokens
from tests.api.conftest import ADMIN_TOKEN, BROKEN, Api
from tests.api.fake_engine import FakeEngine, fails
from tests.api.payloads import VALID_REQUEST, error_of
from tests.api.raw_http import raw_get, raw_post, send_raw
from tests.patience import PATIENCE, eventually

# Beside those of tests/api/hostile_requests.py.
DRAFTS = {"num_speculative_tokens": 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [[1.5]]}, "prompt[0]"),
    ({"prompt": [[1], [True]]}, "prompt[1]"),
    ({"prompt": [[1], [320]]}, "prompt"),
    ({"prompt": ["x"] * 3, "n": 100}, "prompt"),
    ({"prompt": [1, 320]}, "prompt"),
    ({"prompt": [5] * 300}, "prompt"),
    ({"prompt": [5] * 250}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 257}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "a" * 1025}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"n": 0}, "n"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_obfuscation": "no"}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"priority": 2**31}, "priority"),
    ({"kv_cache": 1}, "kv_cache"),
    ({"echo": 1}, "echo"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"suffix": "end", "echo": True}, "suffix"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"5": "1"}}, "logit_bias[5]"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"allowed_token_ids": [5, 320]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": "5"}, "allowed_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"request_id": "two words"}, "request_id"),
    ({"speculative_config": 3}, "speculative_config"),
    ({"speculative_config": {}}, "speculative_config.num_speculative_tokens"),
    ({"speculative_config": DRAFTS | {"num_speculative_tokens": 17}}, "speculative_config.num_speculative_tokens"),
    ({"speculative_config": DRAFTS | {"num_speculative_tokens": True}}, "speculative_config.num_speculative_tokens"),
    ({"speculative_config": DRAFTS | {"method": "eagle"}}, "speculative_config.method"),
    ({"speculative_config": DRAFTS | {"model": "small"}}, "speculative_config.model"),
    ({"speculative_config": DRAFTS | {"prompt_lookup_max": 0}}, "speculative_config.prompt_lookup_max"),
    ({"speculative_config": DRAFTS | {"prompt_lookup_min": 4}}, "speculative_config.prompt_lookup_min"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a(b"}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": "a", "grammar": 'start: "a"'}, "grammar"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(engine: FakeEngine, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json=VALID_REQUEST | change)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"] or error["code"] == "context_length_exceeded"
    assert engine.all(Submit) == []


@pytest.mark.parametrize(
    ("change", "ending"),
    [
        ({"temperature": 3}, "temperature: should be 2 or less, not 3"),
        ({"temperature": "warm"}, 'temperature: should be a number, not "warm"'),
        ({"max_tokens": True}, "max_tokens: should be a whole number, not true"),
        ({"max_tokens": False}, "max_tokens: should be a whole number, not a boolean"),
        ({"kv_cache": 0}, "kv_cache: should be a text, not a number"),
        ({"max_tokens": []}, "max_tokens: should be a whole number, not a list"),
        ({"max_tokens": {}}, "max_tokens: should be a whole number, not an object"),
        ({"seed": 2**64}, f"not {2**64}"),
        ({"kv_cache": "x" * 200}, "not 200"),
        ({"kv_cache": 1}, "not 1"),
        ({"request_id": "two words"}, 'not "two words"'),
        ({"request_id": "x y" * 100}, "..."),
        ({"spaces_between_special_tokens": False}, "false is not supported; leave it out"),
        ({"guided_json": {"uniqueItems": True}}, 'keywords that are not supported: ["uniqueItems"]'),
        ({"guided_json": {"if": {}, "then": False}}, 'keywords that are not supported: ["if", "then"]'),
        (
            {"guided_json": {"const": 2**53 + 1}},
            f"{2**53 + 1} has too many digits to be written exactly; make it a string",
        ),
        (
            {"guided_json": {"type": "integer", "minimum": 2**63}},
            "is beyond 64 bits; make the number a string in the schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "one of json_schema and schema, not none of them"),
        ({"response_format": {"type": "text", "schema": {}}}, "the type text cannot be with schema"),
        ({"guided_json": {"$ref": "https://a.b/c"}}, "move what it refers to into $defs"),
        ({"guided_json": {"oneOf": [{"type": "object"}, {"type": "object"}]}}, "use anyOf"),
        ({"guided_json": {"type": "text"}}, "the types are array, boolean, integer, null, number, object, string"),
        ({"guided_regex": "(?=a)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"logit_bias": {"cat": 1}}, 'not "cat"'),
        ({"logit_bias": {"cat": 1, "5": 1, "-1": 1}}, 'not "cat", "-1"'),
        ({"logit_bias": {str(token): 1 for token in (320, 5, 321, 400)}}, "not 320, 321, 400"),
        (
            {"logit_bias": {str(token): 1 for token in range(1000, 2000)}},
            "1003, 1004 and 995 more",
        ),
        ({"logit_bias": {"320": 1}}, "not 320"),
        ({"prompt": [1, -5]}, "not -5"),
        ({"stop_token_ids": [5, 999]}, "not 999"),
        ({"min_tokens": 17}, "not 17"),
        ({"n": 2, "best_of": 1}, "not 1"),
        ({"stop": [None]}, "stop[0]: should be a text, not null"),
        ({"stop": 5}, "stop: should be a text, or a list of texts, not 5"),
        (
            {"prompt": [1.5, 2]},
            "should be a string, a list of token ids, or a list of such prompts, all of one kind and "
            "without empty lists",
        ),
        ({"stop_token_ids": [5.0, 5.5]}, "stop_token_ids[1]: should be a whole number, not 5.5"),
        (
            {"guided_json": {"properties": {"a": {"items": None, "anyOf": [{}, None]}}}},
            "guided_json: properties.a.anyOf.1: should be a schema (an object, true or false), not null",
        ),
        ({"logit_bias": {"5": None}}, "not null"),
        ({"": 1}, '"" is not a parameter of this endpoint; remove it'),
        ({".n": 1}, ".n is not a parameter of this endpoint; did you mean n?"),
        ({"max_completion_tokens": 5}, "did you mean max_tokens?"),
    ],
    ids=str,
)
def test_a_refusal_names_the_value(engine: FakeEngine, http: httpx.Client, change: dict[str, Any], ending: str) -> None:
    message = error_of(http.post("/v1/completions", json=VALID_REQUEST | change))["message"]
    assert message.removesuffix('"').endswith(ending.removesuffix('"')), message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b'{"model": "tiny", "prompt": "x", "user": NaN}'],
)
def test_bodies_that_are_no_json_object(engine: FakeEngine, http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json(engine: FakeEngine, http: httpx.Client, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = http.post("/v1/completions", content=json.dumps(VALID_REQUEST), headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_all_missing_fields_are_named(engine: FakeEngine, http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"n": 0}))
    assert error["message"] == ("prompt is required; n: should be 1 or more, not 0")
    assert error["param"] == "prompt"


def test_context_length(engine: FakeEngine, openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        openai_client.completions.create(model="tiny", prompt="hello " * 500)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("model", ["other", "tiny:other", "tiny:", " "])
def test_unknown_model(engine: FakeEngine, openai_client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        openai_client.completions.create(model=model, prompt="x")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert "tiny:short" in raised.value.message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("TRACE", "/metrics", 405),
    ],
)
def test_wrong_address(engine: FakeEngine, http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert f"{method} {path}" in error_of(response)["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD"),
        ("/v1/completions", "POST"),
        ("/v1/kv_cache/paged", "GET, PATCH"),
        ("/v1/models", "GET"),
    ],
)
def test_every_method_that_is_allowed_is_named(http: httpx.Client, path: str, allowed: str) -> None:
    response = http.put(path, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert allowed.replace(", ", " or ") in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)
def test_the_engine_refuses(engine: FakeEngine, http: httpx.Client, status: int, kind: str, stream: bool) -> None:
    engine.script = fails(status, "there is no instance 'x'", "unknown_kv_cache", "kv_cache")
    response = http.post("/v1/completions", json=VALID_REQUEST | {"stream": stream, "n": 2})
    assert response.status_code == status
    assert error_of(response) == {
        "message": "there is no instance 'x'",
        "type": kind,
        "param": "kv_cache",
        "code": "unknown_kv_cache",
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_a_full_queue_is_tried_again_after_the_time_that_places_take(engine: FakeEngine, http: httpx.Client) -> None:
    """That is how long the latest request to get its place had waited for it."""

    def admits(submit: Submit) -> list[list[FromEngine]]:
        admitted = Admitted(submit.request_id, "paged", "default", 0, queue_seconds=7.2)
        return [[admitted, Tokens(submit.request_id, [65], "length")]]

    engine.script = admits
    assert http.post("/v1/completions", json=VALID_REQUEST).status_code == 200
    engine.script = fails(429, "2 requests wait already", "queue_full", None)
    response = http.post("/v1/completions", json=VALID_REQUEST)
    assert (response.status_code, response.headers["retry-after"]) == (429, "8")
    engine.script = fails(429, "not now", "another", None)
    assert http.post("/v1/completions", json=VALID_REQUEST).headers["retry-after"] == "1"


def test_a_disabled_strategy_is_not_tried_again(engine: FakeEngine, http: httpx.Client) -> None:
    engine.script = fails(503, "disabled", "strategy_disabled")
    response = http.post("/v1/completions", json=VALID_REQUEST)
    assert (response.status_code, error_of(response)["code"]) == (503, "strategy_disabled")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(("seconds", "result"), [(0.0, "1"), (41.2, "42")])
def test_without_an_engine_the_error_has_the_seconds_until_the_next(
    lone_api: Api, monkeypatch: pytest.MonkeyPatch, seconds: float, result: str
) -> None:
    monkeypatch.setattr(lone_api.client, "estimate_retry_after", lambda: seconds)
    for path in ("/ready", "/metrics", "/v1/models"):
        response = httpx.get(lone_api.url + path, timeout=PATIENCE)
        assert (response.status_code, response.headers["retry-after"]) == (503, result)


def test_an_unexpected_exception(engine: FakeEngine, http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    response = http.post("/v1/completions", json=VALID_REQUEST | {"prompt": BROKEN}, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert response.headers["x-request-id"] == "mine"
    eventually(lambda: "ZeroDivisionError" in caplog.text)  # logged after the answer


@pytest.mark.parametrize("theirs", ["abc-123", None, "", "with space", "x" * 200])
def test_request_id(engine: FakeEngine, http: httpx.Client, theirs: str | None) -> None:
    headers = {} if theirs is None else {"x-request-id": theirs}
    got = http.post("/v1/completions", json=VALID_REQUEST, headers=headers).headers["x-request-id"]
    assert (got == theirs) == (theirs == "abc-123")
    assert got


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (raw_post(b"{"), 400),
        (raw_get("/v1/kv_cache/paged"), 401),
        (raw_get("/nowhere"), 404),
        (raw_get("/v1/completions"), 405),
        (raw_post(b"", length=10**12), 413),
    ],
)
def test_errors_have_the_id_wherever_they_arise(engine: FakeEngine, api: Api, sent: bytes, status: int) -> None:
    answer = send_raw(api.url, sent.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine"))
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "mine"
