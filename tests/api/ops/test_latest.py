"""However many clients poll, the engine gets one query a second, and the text is written once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.engine.ipc.messages import ANSWER_TTL, Failed, Query, get_answer_ttl
from server.metrics.exposition import Renderer
from tests.api.conftest import ADMIN_TOKEN, Api
from tests.api.fake_engine import FakeEngine, snapshot_of
from tests.patience import PATIENCE

POLLERS, POLLS = 16, 12


@pytest.fixture
def dated(api: Api, engine: FakeEngine) -> Iterator[FakeEngine]:
    """An engine whose answers have the time they were made at, as the real one's do; nothing of it is cached yet."""
    engine.dated = True
    api.client.epoch = object()
    yield engine
    api.client.epoch = object()


def poll(api: Api, *paths: str) -> float:
    """All pollers ask for the paths by turns, as fast as they can; the seconds it took."""
    began = time.monotonic()

    def ask(_: int) -> None:
        with httpx.Client(base_url=api.url, timeout=PATIENCE) as http:
            for number in range(POLLS):
                assert http.get(paths[number % len(paths)]).status_code == 200

    with ThreadPoolExecutor(POLLERS) as pool:
        list(pool.map(ask, range(POLLERS)))
    return time.monotonic() - began


def asked(engine: FakeEngine) -> Counter[str]:
    return Counter(str(query.payload) for query in engine.all(Query))


def test_pollers_share_a_question(api: Api, dated: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Counter[str]()
    write = Renderer.render

    def counted(self: Renderer, encoded: bytes, *, openmetrics: bool) -> bytes:
        written["texts"] += 1
        return write(self, encoded, openmetrics=openmetrics)

    monkeypatch.setattr(Renderer, "render", counted)
    seconds = poll(api, "/metrics", "/v1/kv_cache", "/v1/settings", "/ready", "/health")
    most = seconds / ANSWER_TTL + 1
    assert asked(dated).keys() == {"metrics", "kv_cache", "settings"}
    assert max(asked(dated).values()) <= most
    assert written["texts"] <= most


def test_those_who_come_while_it_is_asked_wait_for_the_same_answer(api: Api, dated: FakeEngine) -> None:
    with dated._answering, ThreadPoolExecutor(POLLERS) as pool:  # the engine is in a step
        answers = [pool.submit(httpx.get, f"{api.url}/metrics", timeout=PATIENCE) for _ in range(POLLERS)]
        time.sleep(0.1)  # for some of them to be there; none may be answered
        assert not any(answer.done() for answer in answers)
        threading.Timer(0, dated._answering.release).start()
        assert {answer.result().status_code for answer in answers} == {200}
        dated._answering.acquire()
    assert asked(dated)["metrics"] <= 2


def test_what_was_true_a_second_ago_is_asked_anew(dated: FakeEngine, http: httpx.Client) -> None:
    assert b"kvmux_things 1.0" in http.get("/metrics").content
    dated.answers["metrics"] = snapshot_of(2.0)
    deadline = time.monotonic() + PATIENCE
    while b"kvmux_things 2.0" not in http.get("/metrics").content:
        assert time.monotonic() < deadline
    assert asked(dated)["metrics"] == 2


def test_a_command_makes_what_was_known_old(dated: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/v1/kv_cache").content == dated.answers["kv_cache"]
    dated.answers["kv_cache"] = b"{}"
    clear = http.post("/v1/kv_cache/paged/clear", json={}, headers={"authorization": f"Bearer {ADMIN_TOKEN}"})
    assert clear.status_code == 200
    assert http.get("/v1/kv_cache").content == b"{}"


def test_a_command_that_only_reads_leaves_what_was_known(dated: FakeEngine, http: httpx.Client) -> None:
    admin, began = {"authorization": f"Bearer {ADMIN_TOKEN}"}, time.monotonic()
    for path in ("/v1/live/prefixes", "/v1/kv_cache/paged", "/v1/live/blocks/paged/0/3", "/v1/live/prefixes"):
        assert http.get(path, headers=admin).status_code == 200
    before = asked(dated)["prefixes"]
    assert before <= (time.monotonic() - began) / get_answer_ttl("prefixes") + 1
    assert http.delete("/v1/kv_cache/paged/prefixes/0a", headers=admin).status_code == 200
    assert http.get("/v1/live/prefixes", headers=admin).status_code == 200
    assert asked(dated)["prefixes"] == before + 1


def test_a_refusal_is_not_asked_for_again_either(
    api: Api, dated: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dated, "refused_questions", Failed("", 500, "a strategy cannot tell"))
    began = time.monotonic()
    for _ in range(20):
        assert http.get("/metrics").json()["error"]["message"] == "a strategy cannot tell"
    assert asked(dated)["metrics"] <= (time.monotonic() - began) / ANSWER_TTL + 1
