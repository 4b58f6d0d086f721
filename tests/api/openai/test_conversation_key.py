"""The key of a conversation, and who is left out of roll-outs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.engine.ipc.messages import Submit
from tests.api.conftest import running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import VALID_REQUEST
from tests.patience import PATIENCE

SYSTEM = {"role": "system", "content": "be kind"}
HELLO = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"


def key_of(engine: FakeEngine, http: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> str:
    """Return the conversation key that the engine gets."""
    path = CHAT if "messages" in body else "/v1/completions"
    answer = http.post(path, json=({} if "messages" in body else VALID_REQUEST) | body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return engine.all(Submit)[-1].conversation


def test_the_first_that_exists_counts(engine: FakeEngine, http: httpx.Client) -> None:
    session = {"X-Session-Id": "mine"}
    fields = {"prompt_cache_key": "key", "user": "me"}
    by_header = key_of(engine, http, session, **fields)
    assert by_header == key_of(engine, http, session, prompt="another")
    by_key = key_of(engine, http, **fields)
    assert by_key == key_of(engine, http, prompt="another", prompt_cache_key="key") != by_header
    assert by_key == key_of(engine, http, {"X-Session-Id": ""}, **fields)
    by_user = key_of(engine, http, user="me")
    assert by_user == key_of(engine, http, messages=[HELLO], user="me") != by_key
    assert key_of(engine, http) not in (by_header, by_key, by_user)


def test_clients_share_no_conversation_and_their_words_stay_here(engine: FakeEngine, http: httpx.Client) -> None:
    keys = {
        key_of(engine, http, headers, user="somebody@example.com")
        for headers in ({}, {"Authorization": "Bearer sk-1"}, {"Authorization": "Bearer sk-2"})
    }
    assert len(keys) == 3
    assert all("somebody" not in key and len(key) == 16 for key in keys)


def test_a_chat_keeps_its_key_as_it_grows(engine: FakeEngine, http: httpx.Client) -> None:
    more = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    first = key_of(engine, http, messages=[SYSTEM, HELLO])
    assert first == key_of(engine, http, messages=[SYSTEM, HELLO, *more])
    assert first != key_of(engine, http, messages=[SYSTEM, HELLO | {"content": "bye"}]), "the same system prompt"
    assert key_of(engine, http, messages=[SYSTEM]) == key_of(engine, http, messages=[SYSTEM, more[0]])


def test_a_text_keeps_its_key_as_it_grows(engine: FakeEngine, http: httpx.Client) -> None:
    begin: dict[str, Any] = {"truncate_prompt_tokens": 5}
    text = "a" * 1024
    assert key_of(engine, http, prompt=text, **begin) == key_of(engine, http, prompt=text + "b", **begin)
    assert key_of(engine, http, prompt=text, **begin) != key_of(engine, http, prompt="b" + text, **begin)
    ids = [5] * 256
    assert key_of(engine, http, prompt=ids, **begin) == key_of(engine, http, prompt=[*ids, 6], **begin)
    assert key_of(engine, http, prompt=ids, **begin) != key_of(engine, http, prompt=[6, *ids], **begin)


def test_choices_of_a_prompt_are_one_conversation(engine: FakeEngine, http: httpx.Client) -> None:
    key_of(engine, http, prompt=["x", "y"], n=2)
    keys = [submit.conversation for submit in engine.all(Submit)]
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_request_may_opt_out(engine: FakeEngine, http: httpx.Client, path: str) -> None:
    body = {"messages": [HELLO]} if path == CHAT else VALID_REQUEST
    for field in ({}, {"kv_cache_rollout": True}, {"kv_cache_rollout": False}):
        assert http.post(path, json=body | field).is_success
    assert [submit.rollouts for submit in engine.all(Submit)] == [True, True, False]


def test_a_key_may_opt_out() -> None:
    keys = ["sk-ordinary", "sk-left-out"]
    with (
        running_api(api_keys=keys, key_limits={keys[1]: {"rollouts": False}}) as api,
        FakeEngine(api.socket_path, generates([100])) as engine,
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        for key in keys:
            for field in ({}, {"kv_cache_rollout": True}):
                headers = {"Authorization": f"Bearer {key}"}
                assert client.post("/v1/completions", json=VALID_REQUEST | field, headers=headers).is_success
        assert [submit.rollouts for submit in engine.all(Submit)] == [True, True, False, False]
