"""The fields of requests and responses that concern the cache: tenants, salts, explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest

from server.api.http.api_keys import get_tenant, hash_api_key
from server.api.openai.responses import make_explanation
from server.engine.ipc.messages import Caching, Explained, Failed, FromEngine, Submit, Tokens
from server.records import RequestRecord
from tests.api.fake_engine import FakeEngine, admitted
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of

RECORD = RequestRecord(
    instance="paged",
    reason="default",
    outcome="stop",
    prompt_tokens=9,
    cached_tokens=4,
    miss="salt",
    forked=False,
    generated_tokens=2,
    drafted_tokens=3,
    accepted_tokens=1,
    preemptions=1,
    kv_bytes=4096,
    kept_tokens=7,
    dropped_tokens=3,
    budget_tokens=6,
    compactions=2,
    compaction_seconds=0.01,
    queue_seconds=0.1,
    prefill_seconds=0.2,
    decode_seconds=None,
    first_token_seconds=0.3,
    total_seconds=0.4,
    recomputed_tokens=2,
    rollout="int8",
    shadow="short",
    fidelity_tokens=2,
    fidelity_kl=0.25,
    fidelity_top1=0.5,
)
TOLD = {
    "instance": "paged",
    "reason": "default",
    "cached_tokens": 4,
    "miss_reason": "salt",
    "recomputed_tokens": 2,
    "peak_kv_bytes": 4096,
    "kept_tokens": 7,
    "dropped_tokens": 3,
    "budget_tokens": 6,
    "compactions": 2,
    "compaction_seconds": 0.01,
    "drafted_tokens": 3,
    "accepted_tokens": 1,
    "preemptions": 1,
    "queue_seconds": 0.1,
    "prefill_seconds": 0.2,
    "decode_seconds": None,
    "rollout": "int8",
    "shadow": "short",
    "fidelity": {"tokens": 2, "kl_mean": 0.25, "top1": 0.5},
}


def ask(http: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json=VALID_REQUEST | body, headers=headers or {})


def explains(tokens: list[int]) -> Callable[[Submit], list[list[FromEngine]]]:
    """The tokens one by one, and then how they came about."""

    def script(submit: Submit) -> list[list[FromEngine]]:
        assert submit.explain
        frames: list[list[FromEngine]] = [[admitted(submit)]]
        frames += [[Tokens(submit.request_id, [token])] for token in tokens[:-1]]
        frames += [[Tokens(submit.request_id, tokens[-1:], "length"), Explained(submit.request_id, RECORD)]]
        return frames

    return script


# ---------------------------------------------------------------- tenants
def test_a_tenant_is_an_api_key() -> None:
    assert get_tenant("Bearer sk-1") == get_tenant("bearer  sk-1 ") != get_tenant("Bearer sk-2")
    assert (
        get_tenant(None)
        == get_tenant("")
        == get_tenant("Bearer")
        == get_tenant("Bearer ")
        == get_tenant("Basic abc")
        == ""
    )
    assert "sk-1" not in get_tenant("Bearer sk-1")
    as_it_comes = "schlüssel".encode().decode("latin-1")
    assert get_tenant(f"Bearer {as_it_comes}") == hash_api_key("schlüssel".encode())


def test_requests_carry_their_tenant_and_salt(engine: FakeEngine, http: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-1"}):
        for salt in ({}, {"cache_salt": "mine"}):
            assert ask(http, headers, **salt).is_success
    salts = [(submit.caching.tenant, submit.caching.cache_salt) for submit in engine.all(Submit)]
    key = get_tenant("Bearer sk-1")
    assert salts == [("", ""), ("", "mine"), (key, ""), (key, "mine")]


def test_openai_clients_are_tenants_by_their_key(engine: FakeEngine, openai_client: openai.OpenAI) -> None:
    openai_client.completions.create(model="tiny", prompt="x")
    assert engine.all(Submit)[0].caching.tenant == get_tenant(f"Bearer {openai_client.api_key}")


def test_cache_fields_reach_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    assert ask(http).is_success
    assert ask(http, skip_reading_prefix_cache=True, kv_cache_priority=7, kv_cache_ttl=2.5).is_success
    assert ask(http, kv_cache_ttl="1h30m").is_success
    plain, other, timed = engine.all(Submit)
    assert timed.caching == Caching(ttl=5400.0)
    assert (plain.caching, plain.explain) == (Caching(), False)
    assert other.caching == Caching(max_cached=0, priority=7, ttl=2.5)


@pytest.mark.parametrize(
    "field",
    [
        {"cache_salt": ""},
        {"cache_salt": "x" * 257},
        {"kv_cache_priority": -1},
        {"kv_cache_priority": 101},
        {"kv_cache_ttl": 0},
        {"kv_cache_ttl": "soon"},
        {"kv_cache_ttl": "0s"},
        {"kv_cache_ttl": True},
        {"explain": 1},
        {"skip_reading_prefix_cache": "yes"},
    ],
    ids=str,
)
def test_bad_wishes_are_named(engine: FakeEngine, http: httpx.Client, field: dict[str, Any]) -> None:
    response = ask(http, **field)
    assert (response.status_code, response.json()["error"]["param"]) == (400, *field)[:2]
    assert engine.all(Submit) == []


# ---------------------------------------------------------------- explanations
def test_each_choice_is_explained(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = explains(encode("hello"))
    choices = ask(http, explain=True, n=2).json()["choices"]
    assert [(c["text"], c["finish_reason"], c["kv_cache"]) for c in choices] == [("hello", "length", TOLD)] * 2


def test_the_last_chunk_of_a_stream_explains(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = explains(encode("hello world"))
    choices = [chunk["choices"][0] for chunk in chunks_of(ask(http, explain=True, stream=True))]
    assert "".join(choice["text"] for choice in choices) == "hello world"
    assert [choice.get("kv_cache") for choice in choices] == [None] * (len(choices) - 1) + [TOLD]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_with_a_stop_string_is_explained(
    engine: FakeEngine, http: httpx.Client, encode: Encode, stream: bool
) -> None:
    """The engine goes on, as it knows no stop strings; what it sends after the stop is not delivered."""
    engine.script = explains(encode("hello world hello"))
    response = ask(http, explain=True, stop="o w", stream=stream)
    choices = [c["choices"][0] for c in chunks_of(response)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hell"
    assert (choices[-1]["finish_reason"], choices[-1]["kv_cache"]) == ("stop", TOLD)


def test_without_a_shadow_there_is_no_fidelity() -> None:
    plain = msgspec.structs.replace(RECORD, rollout=None, shadow=None, fidelity_tokens=0)
    explanation = msgspec.to_builtins(make_explanation(plain))
    assert (explanation["rollout"], explanation["shadow"], explanation["fidelity"]) == (None, None, None)


def test_a_failure_ends_it_without_an_explanation(engine: FakeEngine, http: httpx.Client, encode: Encode) -> None:
    engine.script = lambda submit: [
        [admitted(submit), Tokens(submit.request_id, encode("h")), Failed(submit.request_id, 500, "broken")]
    ]
    assert ask(http, explain=True).status_code == 500


def test_who_does_not_ask_gets_none(engine: FakeEngine, http: httpx.Client) -> None:
    assert "kv_cache" not in ask(http).json()["choices"][0]
