"""How urgent requests may be, and how long they may keep their prefixes: by default, and by API key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from config.settings import Settings
from server.engine.ipc.messages import Submit
from tests.api.conftest import running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import VALID_REQUEST, error_of
from tests.patience import PATIENCE

KEYS = ["sk-ordinary", "sk-urgent-team"]
LIMITS = {"sk-urgent-team": {"min_priority": -10, "max_kv_cache_priority": 50}}
DEFAULTS = {name: Settings.model_fields[name].default for name in ("min_priority", "max_kv_cache_priority")}


@pytest.fixture(scope="module")
def bounded() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """An API process with the default bounds, and others for one of its two keys."""
    with (
        running_api(api_keys=KEYS, key_limits=LIMITS, **DEFAULTS) as api,
        FakeEngine(api.socket_path, generates([100])) as engine,
    ):
        api.await_ready()
        with httpx.Client(base_url=api.url, timeout=PATIENCE) as client:
            yield client, engine


def ask(
    bounded: tuple[httpx.Client, FakeEngine], key: str, route: str = "/v1/completions", **fields: Any
) -> httpx.Response:
    client, engine = bounded
    engine.begin_again(generates([100]))
    body = VALID_REQUEST | fields
    if route == "/v1/chat/completions":
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | fields
    return client.post(route, json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("field", "value"), [("priority", -1), ("priority", -(2**31)), ("kv_cache_priority", 1)])
def test_by_default_nothing_goes_before_others_or_stays_longer(
    bounded: tuple[httpx.Client, FakeEngine], route: str, field: str, value: int
) -> None:
    response = ask(bounded, KEYS[0], route, **{field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == field
    assert f", not {value};" in error["message"]
    assert f"m{'in' if field == 'priority' else 'ax_kv_cache'}_priority" in error["message"]
    assert bounded[1].all(Submit) == []


@pytest.mark.parametrize("key", KEYS)
def test_less_urgent_is_always_allowed(bounded: tuple[httpx.Client, FakeEngine], key: str) -> None:
    assert ask(bounded, key, priority=2**31 - 1, kv_cache_priority=0).is_success


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"priority": -10, "kv_cache_priority": 50}, True),
        ({"priority": -11}, False),
        ({"kv_cache_priority": 51}, False),
    ],
)
def test_a_key_may_have_bounds_of_its_own(
    bounded: tuple[httpx.Client, FakeEngine], fields: dict[str, int], allowed: bool
) -> None:
    assert ask(bounded, KEYS[1], **fields).is_success == allowed
    if allowed:
        (submit,) = bounded[1].all(Submit)
        assert (submit.priority, submit.caching.priority) == (-10, 50)


def test_a_key_without_one_of_the_bounds_has_the_servers() -> None:
    with (
        running_api(
            api_keys=KEYS, key_limits={KEYS[0]: {"min_priority": -3}}, min_priority=-1, max_kv_cache_priority=7
        ) as api,
        FakeEngine(api.socket_path, generates([100])) as engine,
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        assert ask((client, engine), KEYS[0], priority=-3, kv_cache_priority=7).is_success
        assert ask((client, engine), KEYS[1], priority=-1, kv_cache_priority=7).is_success
        assert ask((client, engine), KEYS[1], priority=-3).status_code == 400
        assert ask((client, engine), KEYS[0], kv_cache_priority=8).status_code == 400


def test_a_limit_for_a_key_that_does_not_exist_is_refused_without_showing_it() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=KEYS, key_limits={"sk-mistyped-secret": {"min_priority": -3}})
    assert "key_limits names a key that is not one of api_keys" in caught.value.errors()[0]["msg"]
    assert "mistyped" not in caught.value.errors()[0]["msg"]
