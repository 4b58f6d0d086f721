"""Roll-outs over HTTP: what reaches the engine, who may send it, and what a wrong body is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.api.http.api_keys import hash_api_key
from server.engine.ipc.messages import ControlRollout, Failed, Query, StartRollout
from tests.api.conftest import ADMIN_TOKEN, running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import error_of
from tests.patience import PATIENCE

PATH = "/v1/rollouts"
BY = f"key {hash_api_key(ADMIN_TOKEN.encode())[:8]}"
SETTINGS: dict[str, Any] = {
    "from": "paged",
    "to": "short",
    "shadow": "5%",
    "canary": ["1%", "100%"],
    "hold": 1.5,
    "guard": {"kl_mean": 0.02, "top1": "off", "min_requests": 5},
}
ACTIONS = ("pause", "resume", "advance", "abort")
API_KEY = "sk-some-client"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def post(http: httpx.Client, path: str = "", body: Any = None, token: str = ADMIN_TOKEN) -> httpx.Response:
    return http.post(PATH + path, json=body, headers=bearer(token))


def test_the_settings_reach_the_engine_as_they_were_sent(engine: FakeEngine, http: httpx.Client) -> None:
    assert post(http, body={"name": "int8", **SETTINGS}).json() == {"obeyed": True}
    least = {"from": "paged", "to": "short"}
    assert post(http, body={"name": "least", **least, "hold": None}).is_success
    assert post(http, body={"name": "timed", **least, "hold": "10m", "guard": {"top1": "98%"}}).is_success
    assert [query.payload for query in engine.all(Query)] == [
        StartRollout("int8", SETTINGS, BY),
        StartRollout("least", least, BY),
        StartRollout("timed", least | {"hold": 600.0, "guard": {"top1": "98%"}}, BY),
    ]
    assert ADMIN_TOKEN not in BY


@pytest.mark.parametrize("action", ACTIONS)
def test_a_roll_out_is_controlled(engine: FakeEngine, http: httpx.Client, action: Any) -> None:
    assert post(http, f"/int8/{action}").json() == {"obeyed": True}
    (query,) = engine.all(Query)
    assert query.payload == ControlRollout("int8", action, BY)


@pytest.mark.parametrize("path", ["", *(f"/int8/{action}" for action in ACTIONS)])
@pytest.mark.parametrize("token", ["", "open-sesam"])
def test_without_the_admin_token_nothing_is_changed(
    engine: FakeEngine, http: httpx.Client, path: str, token: str
) -> None:
    answer = http.post(PATH + path, json={"name": "int8", **SETTINGS}, headers=bearer(token) if token else {})
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    assert engine.all(Query) == []


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"name": "a b"}, "name"),
        ({"name": None}, "name"),
        ({"from": None}, "from"),
        ({"from": 5}, "from"),
        ({"shadow": 5}, "shadow"),
        ({"canary": []}, "canary"),
        ({"hold": -1}, "hold"),
        ({"hold": "soon"}, "hold"),
        ({"guard": {"top1": []}}, "guard.top1"),
        ({"guard": {"kl_men": 1}}, "guard.kl_men"),
        ({"guard": []}, "guard"),
        ({"from_": "paged"}, "from_"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(engine: FakeEngine, http: httpx.Client, changed: dict[str, Any], param: str) -> None:
    answer = post(http, body={"name": "int8", **SETTINGS, **changed})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert engine.all(Query) == []


def test_a_refusal_by_the_engine_is_the_response(engine: FakeEngine, http: httpx.Client) -> None:
    engine.refusal = Failed("", 409, "it runs already", "not_so")
    answer = post(http, body={"name": "int8", **SETTINGS})
    assert (answer.status_code, error_of(answer)["message"]) == (409, "it runs already")


def test_an_unknown_action_is_an_unknown_url(engine: FakeEngine, http: httpx.Client) -> None:
    assert (post(http, "/int8/explode").status_code, engine.all(Query)) == (404, [])


def test_one_roll_out_is_found_by_its_name(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get(f"{PATH}/int8").json() == {"name": "int8", "state": "canary"}
    answer = http.get(f"{PATH}/int4")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    assert "there is int8" in error_of(answer)["message"]


@pytest.fixture(scope="module")
def keyed() -> Iterator[httpx.Client]:
    with (
        running_api(api_keys=[API_KEY]) as api,
        FakeEngine(api.socket_path, generates([100])),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client


@pytest.mark.parametrize("path", [PATH, f"{PATH}/int8", "/rollouts", "/v1/fidelity", "/fidelity"])
def test_an_api_key_reads_and_so_does_the_admin_token(keyed: httpx.Client, path: str) -> None:
    assert keyed.get(path).status_code == 401
    for token in (API_KEY, ADMIN_TOKEN):
        assert keyed.get(path, headers=bearer(token)).status_code == 200
    assert keyed.get("/v1/models", headers=bearer(ADMIN_TOKEN)).status_code == 401


@pytest.mark.parametrize("path", [PATH, "/rollouts", f"{PATH}/int8/abort"])
def test_an_api_key_changes_nothing(keyed: httpx.Client, path: str) -> None:
    assert keyed.post(path, json={"name": "x", **SETTINGS}, headers=bearer(API_KEY)).status_code == 401
