"""The API through Ray Serve: what a single server answers, several replicas answer together."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from server.cluster.router import GRACE
from tests.cluster.ray_cluster import Cluster, running
from tests.end_to_end.server_process import PATIENCE, eventually

pytestmark = pytest.mark.ray

NUM_REPLICAS = 2
ADMIN = {"authorization": "Bearer operators-token"}
TEXT = "Once upon a time there was a king who had three daughters. "


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--kv-memory", "64MiB", "--max-num-seqs", "16", "--admin-token", "operators-token")
    with running("--replicas", str(NUM_REPLICAS), *flags) as started:
        started.wait_for_replicas(NUM_REPLICAS)
        yield started


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)


def unique() -> str:
    """Return a beginning that no other prompt has."""
    return f"{random.getrandbits(64):x} "


def admin(cluster: Cluster, method: str, path: str, **body: object) -> httpx.Response:
    return httpx.request(method, cluster.url + path, json=body or None, headers=ADMIN, timeout=PATIENCE)


# ---------------------------------------------------------------- generation
def test_openai_client_gets_whole_and_streamed_answers(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": unique() + TEXT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**body, stream=True))  # type: ignore[call-overload]
    assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text != ""
    assert whole.usage.completion_tokens == 12


def test_chats_choices_and_several_prompts(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": unique() + TEXT}]
    chat = client.chat.completions.create(model="tiny", messages=messages, n=3, max_tokens=5)  # type: ignore[arg-type]
    assert [each.index for each in chat.choices] == [0, 1, 2]
    prompts = [unique() + TEXT for _ in range(4)]
    several = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=4)
    assert [each.index for each in several.choices] == list(range(8))


def test_a_stop_string_ends_a_text(cluster: Cluster) -> None:
    body = {"prompt": unique() + TEXT, "max_tokens": 60, "temperature": 0, "explain": True}
    text = cluster.complete(**body)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    choice = cluster.complete(**body, stop=stop)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(stop)]
    assert choice["kv_cache"]["routed"]["replica"], "a record follows a stop string, too"


def test_errors_are_those_of_a_single_server(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="unknown", prompt="a")
    with pytest.raises(openai.BadRequestError, match="there is no cache strategy"):
        client.completions.create(model="tiny", prompt="a", extra_body={"kv_cache": "unknown"})


# ---------------------------------------------------------------- routing
def test_a_prompt_returns_to_the_replica_that_has_it(cluster: Cluster) -> None:
    prompt = unique() + TEXT * 12
    first = cluster.complete(prompt=prompt, max_tokens=1, explain=True)["choices"][0]["kv_cache"]
    for _ in range(4):
        again = cluster.complete(prompt=prompt + unique(), max_tokens=1, explain=True)["choices"][0]["kv_cache"]
        assert again["routed"]["replica"] == first["routed"]["replica"]
        assert again["routed"]["reason"] == "cached"
        assert again["routed"]["expected_cached_tokens"] == again["cached_tokens"] > 100


def test_the_next_turn_is_expected_to_find_the_answer(cluster: Cluster) -> None:
    """At once, before any report: the router and the client of replicas share a list."""
    prompt, body = unique() + TEXT * 4, {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "explain": True}
    for _ in range(3):
        choice = cluster.complete(prompt=prompt, **body)["choices"][0]
        prompt += choice["text"]
        found = cluster.complete(prompt=prompt, max_tokens=1, explain=True)["choices"][0]["kv_cache"]
        assert found["routed"]["expected_cached_tokens"] == found["cached_tokens"]


def test_salts_share_nothing(cluster: Cluster) -> None:
    prompt = unique() + TEXT * 12
    for salt in ("one", "two"):
        found = cluster.complete(prompt=prompt, max_tokens=1, explain=True, cache_salt=salt)["choices"][0]["kv_cache"]
        assert (found["cached_tokens"], found["routed"]["expected_cached_tokens"]) == (0, 0)


def test_statistics_correct_what_a_router_believes(cluster: Cluster) -> None:
    """What was cleared is not expected any more, once the replicas have reported it and GRACE has passed."""
    prompt = unique() + TEXT * 12
    cluster.complete(prompt=prompt, max_tokens=1)
    assert admin(cluster, "POST", "/v1/kv_cache/paged/clear").json()["freed_bytes"] > 0
    time.sleep(GRACE + 3.0)
    found = cluster.complete(prompt=prompt, max_tokens=1, explain=True)["choices"][0]["kv_cache"]
    assert (found["routed"]["expected_cached_tokens"], found["cached_tokens"]) == (0, 0)


# ---------------------------------------------------------------- administration, metrics, live state
def test_commands_reach_all_replicas(cluster: Cluster) -> None:
    ids = cluster.list_replicas()
    share = admin(cluster, "PATCH", "/v1/kv_cache/paged", limit="90%").json()
    assert sorted(share["replicas"]) == ids
    instances = [each for each in cluster.get_json("/v1/kv_cache")["data"] if each["name"] == "paged"]
    assert sorted(each["replica"] for each in instances) == ids
    assert {each["limit_bytes"] for each in instances} == {share["limit_bytes"]}
    assert sorted(admin(cluster, "GET", "/v1/kv_cache/paged").json()["replicas"]) == ids
    assert admin(cluster, "POST", "/v1/kv_cache/unknown/clear").status_code == 404
    assert httpx.post(f"{cluster.url}/v1/kv_cache/paged/clear").status_code == 401


def test_a_pin_is_removed_where_it_is(cluster: Cluster) -> None:
    prompt = unique() + TEXT * 4
    replica = cluster.complete(prompt=prompt, max_tokens=1, explain=True)["choices"][0]["kv_cache"]["routed"]["replica"]
    pinned = admin(cluster, "POST", "/v1/kv_cache/paged/pins", prompt=prompt, ttl=600).json()
    assert pinned["id"].startswith(f"{replica}:"), pinned
    assert [id for id, each in pinned["replicas"].items() if "error" not in each] == [replica]
    assert admin(cluster, "DELETE", f"/v1/kv_cache/paged/pins/{pinned['id']}").json()["deleted"]
    assert admin(cluster, "DELETE", f"/v1/kv_cache/paged/pins/{pinned['id']}").status_code == 404
    assert admin(cluster, "DELETE", "/v1/kv_cache/paged/pins/pin-1").status_code == 404


def test_rollouts_run_in_all_replicas(cluster: Cluster) -> None:
    body = {"name": "ring", "from": "paged", "to": "sliding_window", "canary": ["50%"], "hold": 3600}
    assert sorted(admin(cluster, "POST", "/v1/rollouts", **body).json()["replicas"]) == cluster.list_replicas()
    assert admin(cluster, "POST", "/v1/rollouts/ring/advance").json()["stage"] == 1
    shown = cluster.get_json("/v1/rollouts/ring")
    assert sorted(shown["replicas"]) == cluster.list_replicas()
    served = {
        session: {
            httpx.post(
                f"{cluster.url}/v1/completions",
                json={"prompt": unique(), "max_tokens": 1},
                headers={"x-session-id": session},
                timeout=PATIENCE,
            ).json()["kv_cache"]["instance"]
            for _ in range(4)
        }
        for session in map(str, range(12))
    }
    assert all(len(each) == 1 for each in served.values()), "a conversation has one instance, in whatever replica"
    assert set.union(*served.values()) == {"paged", "sliding_window"}
    assert admin(cluster, "POST", "/v1/rollouts/ring/abort").status_code == 200


def test_metrics_are_by_replica(cluster: Cluster) -> None:
    for _ in range(4):
        cluster.complete(prompt=[unique() + TEXT] * 2, max_tokens=1)
    ids = cluster.list_replicas()

    def sum_requests() -> float:
        return sum(cluster.metric("kvmux_requests_total", replica=id) for id in ids)

    eventually(lambda: sum_requests() >= 8)
    assert cluster.metric("kvmux_router_requests_total") >= 8
    assert cluster.metric("kvmux_http_responses_total", code="200") > 0
    one = cluster.get(f"/replicas/{ids[0]}/metrics").text
    assert "replica=" not in one
    assert "kvmux_requests_total" in one


def test_each_replica_has_the_whole_api_below_its_path(cluster: Cluster) -> None:
    for id in cluster.list_replicas():
        base = f"/replicas/{id}"
        answer = httpx.post(
            f"{cluster.url}{base}/v1/completions",
            json={"prompt": unique(), "max_tokens": 1, "explain": True},
            timeout=PATIENCE,
        ).json()
        routed = answer["choices"][0]["kv_cache"]["routed"]
        assert (routed["replica"], routed["reason"]) == (id, "asked for")
        assert "regions" in admin(cluster, "GET", f"{base}/v1/live").json()
        assert cluster.get(f"{base}/ui/").status_code == 200
        assert admin(cluster, "POST", f"{base}/v1/kv_cache/paged/clear").json().keys() == {"freed_bytes"}
        assert httpx.get(f"{cluster.url}{base}/v1/kv_cache/paged").status_code == 401, (
            "the token is asked for here, too"
        )
    assert cluster.get("/replicas/unknown/v1/models").status_code == 404


def test_answers_of_one_replica_name_it(cluster: Cluster) -> None:
    first = cluster.list_replicas()[0]
    paths = ["/v1/live", "/v1/live/prefixes", "/v1/settings", "/live", "/live/prefixes", "/settings"]
    assert {path: admin(cluster, "GET", path).headers["x-kvmux-replica"] for path in paths} == dict.fromkeys(
        paths, first
    )
    assert admin(cluster, "POST", "/v1/profile", steps=1, seconds=0.1).headers["x-kvmux-replica"] == first
    assert "x-kvmux-replica" not in admin(cluster, "GET", "/v1/kv_cache").headers
    assert httpx.get(f"{cluster.url}/v1/live", timeout=PATIENCE).status_code == 401


def test_the_live_state_is_streamed(cluster: Cluster) -> None:
    with httpx.stream("GET", f"{cluster.url}/v1/live/events", headers=ADMIN, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: snapshot"
        assert "regions" in json.loads(next(lines).removeprefix("data: "))
        assert "event: change" in (next(lines) for _ in range(6))


def test_profiles_are_recorded(cluster: Cluster) -> None:
    body = {"steps": 1, "seconds": 0.5}
    assert "traceEvents" in admin(cluster, "POST", "/v1/profile", **body).json()


def test_an_operator_ends_a_request(cluster: Cluster) -> None:
    for id in cluster.list_replicas():
        body = {"prompt": unique(), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        url = f"{cluster.url}/replicas/{id}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            requests = admin(cluster, "GET", f"/replicas/{id}/v1/live").json()["requests"]
            (key,) = requests
            assert admin(cluster, "DELETE", f"/v1/live/requests/{key}").status_code == 200
            assert any("ended by an operator" in line for line in lines)
