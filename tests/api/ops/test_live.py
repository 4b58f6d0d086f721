"""The live state over HTTP: its changes add up to the whole, and only operators or this machine may watch it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from server.api.http.local_access import find_local_refusal, is_loopback
from server.api.ops import live
from server.api.ops.live import find_runs, make_change, make_merge_patch
from server.engine.ipc.messages import Abort, DescribeBlock, Failed, Query
from server.engine.ipc.socket_client import SocketClient
from tests.api.conftest import ADMIN_TOKEN, Api, running_api
from tests.api.fake_engine import FakeEngine, generates, live_state_of
from tests.api.payloads import error_of
from tests.patience import PATIENCE

ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
PATHS = ("/v1/live", "/v1/live/events", "/v1/live/prefixes", "/v1/live/blocks/paged/0/1", "/live")


@pytest.fixture(scope="module")
def open_api() -> Iterator[Api]:
    """Without an admin token, so that only this machine may watch."""
    with running_api(admin_token=None) as api:
        yield api


@pytest.fixture(scope="module")
def open_engine(open_api: Api) -> Iterator[FakeEngine]:
    with FakeEngine(open_api.socket_path, generates([100])) as engine:
        open_api.await_ready()
        yield engine


# ---------------------------------------------------------------- a client that follows the changes
def read_events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield (name, data) of each server-sent event."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def merge(target: Any, patch: Any) -> Any:
    """Return `target` after a JSON merge patch, by the pseudocode of RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def apply_change(state: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after a `change`, as a client computes it."""
    merged: dict[str, Any] = merge(state, change["patch"])
    regions = dict(merged["regions"])
    for name, runs in change["states"].items():
        states = bytearray(base64.b64decode(regions[name]["states"]))
        for first, run in runs:
            states[first : first + len(base64.b64decode(run))] = base64.b64decode(run)
        regions[name] = {**regions[name], "states": base64.b64encode(states).decode()}
    return {**merged, "regions": regions}


# ---------------------------------------------------------------- contents
def test_it_is_what_the_engine_describes(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.get("/v1/live", headers=ADMIN)
    assert response.content == engine.answers["live"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"


def test_a_stream_begins_with_a_snapshot_and_goes_on_with_changes(engine: FakeEngine, api: Api) -> None:
    with httpx.stream("GET", f"{api.url}/v1/live/events", headers=ADMIN, timeout=PATIENCE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = read_events(response)
        name, state = next(events)
        assert (name, state) == ("snapshot", json.loads(engine.answers["live"]))
        assert next(events) == ("change", {"patch": {}, "states": {}})
        engine.answers["live"] = live_state_of(2)
        while state != json.loads(engine.answers["live"]):
            name, change = next(events)
            assert name == "change"
            state = apply_change(state, change)


def test_a_region_that_grew_is_sent_from_where_it_grew_and_a_shorter_one_as_a_whole() -> None:
    short, long = (json.loads(live_state_of(2, num_cells)) for num_cells in (100, 200))
    grown, shrunk = make_change(short, long), make_change(long, short)
    assert [first for first, _ in grown["states"]["paged/0"]] == [64]
    assert grown["patch"] == {"regions": {"paged/0": {"held_blocks": 200}}}
    assert apply_change(short, grown) == long
    assert not shrunk["states"]
    assert apply_change(long, shrunk) == short


def test_random_changes_lead_to_the_new_state() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for _ in range(200):
        old, new = draw_state(rng), draw_state(rng)
        assert apply_change(old, json.loads(json.dumps(make_change(old, new)))) == new


def draw_state(rng: random.Random) -> dict[str, Any]:
    """Return a state with some of three regions, which have few or many cells and any other fields."""
    regions = {}
    for name in rng.sample(("paged/0", "paged/1", "contiguous/0"), rng.randrange(4)):
        states = bytes(rng.random() < 0.004 for _ in range(rng.choice((0, 64, 150, 300))))
        regions[name] = {**draw_object(rng, 1), "states": base64.b64encode(states).decode()}
    return {**draw_object(rng, 3), "regions": regions}


def draw_object(rng: random.Random, depth: int) -> dict[str, Any]:
    def draw_value() -> Any:
        if depth and rng.random() < 0.5:
            return draw_object(rng, depth - 1)
        return rng.choice([0, 1, True, "x", [1, {"a": 2}], []])

    return {name: draw_value() for name in "abcd" if rng.random() < 0.6}


def test_runs_cover_what_differs_and_little_else() -> None:
    old = bytes(1000)
    new = bytearray(old)
    new[130] = new[140] = new[200] = new[999] = 1
    assert find_runs(old, bytes(new)) == [(128, 256), (960, 1000)]
    assert find_runs(old, old) == []
    assert find_runs(old[:100], old) == [(64, 1000)]
    assert make_merge_patch({"a": {"b": 1}}, {"a": {"b": 1}}) == {}


def test_watchers_are_told_that_the_engine_is_away_and_get_a_snapshot_of_the_next() -> None:
    with (
        running_api() as api,
        httpx.stream("GET", f"{api.url}/v1/live/events", headers=ADMIN, timeout=PATIENCE) as response,
    ):
        events = read_events(response)
        name, data = next(events)
        assert (name, data.keys()) == ("unavailable", {"message", "retry_after"})
        with FakeEngine(api.socket_path, generates([])) as engine:
            while (event := next(events))[0] == "unavailable":
                pass
            assert event == ("snapshot", json.loads(engine.answers["live"]))
            engine.refused_questions = Failed("", 500, "the engine failed to answer")
            while (event := next(events))[0] == "change":
                pass
            assert event == ("unavailable", {"message": "the engine failed to answer", "retry_after": 0.0})


# ---------------------------------------------------------------- prefixes and blocks
def test_prefixes_are_what_the_engine_lists(engine: FakeEngine, http: httpx.Client) -> None:
    for path in ("/v1/live/prefixes", "/live/prefixes"):
        response = http.get(path, headers=ADMIN)
        assert response.content == engine.answers["prefixes"]
        assert response.headers["content-type"] == "application/json"
        assert response.headers["cache-control"] == "no-store"


def test_a_block_is_described_by_its_number(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/v1/live/blocks/paged/1/17", headers=ADMIN).json() == {"obeyed": True}
    assert [query.payload for query in engine.all(Query)] == [DescribeBlock("paged", 1, 17)]
    engine.refusal = Failed("", 404, "there is no block 17", code="not_found")
    refused = http.get("/v1/live/blocks/paged/1/17", headers=ADMIN)
    assert (refused.status_code, error_of(refused)["code"]) == (404, "not_found")


@pytest.mark.parametrize("number", ["x", "-1", f"{2**63}", "1.5"])
def test_a_region_or_block_that_is_no_number_is_refused(engine: FakeEngine, http: httpx.Client, number: str) -> None:
    for path in (f"{number}/0", f"0/{number}"):
        assert http.get(f"/v1/live/blocks/paged/{path}", headers=ADMIN).status_code == 400
    assert engine.all(Query) == []


# ---------------------------------------------------------------- streams
def test_streams_end_with_the_server_and_do_not_delay_it() -> None:
    begun, ended = threading.Event(), threading.Event()

    def watch(url: str) -> None:
        with httpx.stream("GET", f"{url}/v1/live/events", headers=ADMIN, timeout=PATIENCE) as response:
            for _ in read_events(response):
                begun.set()
        ended.set()

    with running_api(drain_seconds=3600) as api:  # longer than a test may take
        watcher = threading.Thread(target=watch, args=(api.url,))
        watcher.start()
        assert begun.wait(PATIENCE)
    assert ended.wait(PATIENCE)
    watcher.join()


@pytest.mark.parametrize("how", ["stops", "drains"])
def test_a_stream_goes_on_until_its_process_stops_or_drains(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.01)
    draining = False

    async def watch() -> list[bytes]:
        nonlocal draining
        state = live.LiveState(SocketClient("unused"), lambda: draining)
        events = []
        async for event in state.stream():
            events.append(event)
            if len(events) == 4:
                draining = how == "drains"
            if len(events) == 4 and how == "stops":
                state.stop()
        return events

    events = asyncio.run(watch())
    assert len(events) == 4
    assert all(each.startswith(b"event: unavailable\n") for each in events)


def test_clients_that_come_at_once_are_limited_too(engine: FakeEngine, api: Api) -> None:
    request = f"GET /v1/live/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(api.url).port)
        sockets = [
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
            for _ in range(live.MAX_STREAMS + 40)
        ]
        for each in sockets:
            each.sendall(request)
        answers = [each.recv(12) for each in sockets]
    assert answers.count(b"HTTP/1.1 200") == live.MAX_STREAMS
    assert answers.count(b"HTTP/1.1 429") == 40


def test_a_client_that_leaves_makes_room_for_another(
    engine: FakeEngine, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 2)
    url = f"{api.url}/v1/live/events"
    with contextlib.ExitStack() as stack:
        responses = [stack.enter_context(httpx.stream("GET", url, headers=ADMIN, timeout=PATIENCE)) for _ in range(2)]
        watchers = [read_events(response) for response in responses]  # a discarded one would close its response
        assert [next(events)[0] for events in watchers] == ["snapshot", "snapshot"]
        refused = httpx.get(url, headers=ADMIN, timeout=PATIENCE)
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "too_many_streams"
    deadline = time.monotonic() + PATIENCE
    while True:
        with httpx.stream("GET", url, headers=ADMIN, timeout=PATIENCE) as response:
            if response.status_code == 200:
                break
        assert time.monotonic() < deadline, "streams whose clients have left still count"
        time.sleep(0.05)


# ---------------------------------------------------------------- ending a request
def test_an_operator_ends_a_request_by_its_key(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.delete("/v1/live/requests/3/cmpl-1-0-0", headers=ADMIN).json() == {"obeyed": True}
    assert list_aborts(engine) == [Abort(3, "cmpl-1-0-0")]
    engine.refusal = Failed("", 404, "there is no request 'x'", code="not_found")
    assert http.delete("/v1/live/requests/3/x", headers=ADMIN).status_code == 404
    for worker in ("x", "-1", str(2**64)):
        assert http.delete(f"/v1/live/requests/{worker}/x", headers=ADMIN).status_code == 400


def list_aborts(engine: FakeEngine) -> list[Abort]:
    return [query.payload for query in engine.all(Query) if isinstance(query.payload, Abort)]


def test_nothing_is_ended_without_the_admin_token(
    engine: FakeEngine, http: httpx.Client, open_api: Api, open_engine: FakeEngine
) -> None:
    open_engine.begin_again(generates([]))
    assert http.delete("/v1/live/requests/0/x").status_code == 401
    refused = httpx.delete(f"{open_api.url}/v1/live/requests/0/x", timeout=PATIENCE)
    assert error_of(refused)["code"] == "admin_off"
    assert not list_aborts(engine) + list_aborts(open_engine)


# ---------------------------------------------------------------- who may watch
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [None, "Bearer", "Bearer wrong", f"Basic {ADMIN_TOKEN}"])
def test_with_an_admin_token_it_is_needed_on_this_machine_too(
    engine: FakeEngine, http: httpx.Client, path: str, token: str | None
) -> None:
    refused = http.get(path, headers={} if token is None else {"authorization": token})
    assert refused.status_code == 401
    assert error_of(refused)["code"] == "invalid_api_key"


def test_an_api_key_does_not_open_it() -> None:
    with running_api(api_keys=["sk-one"]) as api:
        assert (
            httpx.get(f"{api.url}/v1/live", headers={"authorization": "Bearer sk-one"}, timeout=PATIENCE).status_code
            == 401
        )


OWN = [
    {},
    {"host": "localhost:8000"},
    {"host": "127.0.0.1"},
    {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    {"host": "localhost:1", "origin": "http://localhost:1", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    {"host": "LocalHost:8000", "referer": "http://LocalHost:8000/ui/"},
]
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8000"},
    {"host": "localhost.evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "192.168.1.7:8000"},
    {"host": "0.0.0.0:8000"},
    {"host": "user@evil.example"},
    {"host": ""},
    {"origin": "http://evil.example"},
    {"host": "localhost:8000", "origin": "http://localhost:9000"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"x-forwarded-for": "10.0.0.1"},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "10.0.0.1"},
    {"x-forwarded-host": "localhost"},
    *({name: "10.0.0.1"} for name in ("x-forwarded-server", "x-client-ip", "true-client-ip", "fly-client-ip")),
    *({name: "10.0.0.1"} for name in ("cf-connecting-ip", "x-original-forwarded-for", "x-cluster-client-ip")),
    {"host": "[::1"},
    {"host": "evil.example@localhost"},
    {"host": "127.0.0.1:abc"},
    {"host": "localhost:99999999"},
    {"referer": "http://evil.example/ui/"},
    {"referer": "http://[::1/"},
]


@pytest.mark.parametrize("headers", OWN)
def test_without_an_admin_token_this_machine_may_watch(
    open_api: Api, open_engine: FakeEngine, headers: dict[str, str]
) -> None:
    assert httpx.get(f"{open_api.url}/v1/live", headers=headers, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", FOREIGN)
def test_without_an_admin_token_nothing_else_may(
    open_api: Api, open_engine: FakeEngine, headers: dict[str, str], path: str
) -> None:
    refused = httpx.get(f"{open_api.url}{path}", headers=headers, timeout=PATIENCE)
    assert refused.status_code == 403
    error = error_of(refused)
    assert error["code"] == "local_only"
    assert any(name in error["message"].lower() for name in headers)


def test_another_address_of_this_machine_is_not_loopback(open_api: Api, open_engine: FakeEngine) -> None:
    scope = {"type": "http", "headers": [(b"host", b"localhost")], "client": ("10.1.2.3", 5)}
    assert find_local_refusal(scope) is not None
    assert find_local_refusal({**scope, "client": None}) is not None
    assert find_local_refusal({**scope, "client": ("::1", 5)}) is None
    assert find_local_refusal({**scope, "client": ("127.9.9.9", 5)}) is None
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")


def test_http_1_0_is_spoken_by_proxies() -> None:
    scope = {"type": "http", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 5), "http_version": "1.0"}
    refused = find_local_refusal(scope)
    assert refused is not None
    assert "HTTP/1.0" in refused.message
