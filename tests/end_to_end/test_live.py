"""The live state of a real server under load: changes add up, a request is ended, and nothing is left."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.api.ops.test_live import apply_change, read_events
from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving

TOKEN = "an-operators-secret-token"
ADMIN = {"authorization": f"Bearer {TOKEN}"}
STRATEGIES = ("paged", "contiguous", "sliding_window")

TOTALS = {  # names in the live state, and those of the metrics that count the same
    "prompt_tokens": "kvmux_prompt_tokens_total",
    "cached_tokens": "kvmux_prompt_tokens_cached_total",
    "generated_tokens": "kvmux_generation_tokens_total",
    "preemptions": "kvmux_num_preemptions_total",
    "evicted_bytes": "kvmux_kv_cache_evicted_bytes_total",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--admin-token", TOKEN, "--kv-memory", "64MiB", "--threads", "1") as server:
        yield server


def read_live(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{server.url}/v1/live", headers=ADMIN, timeout=PATIENCE).json()
    return state


def follow(events: Iterator[tuple[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    """Return the state after the next change."""
    name, change = next(events)
    assert name == "change"
    return apply_change(state, change)


def test_changes_add_up_under_load(server: Server) -> None:
    stop = threading.Event()

    def load(number: int) -> Counter[tuple[str, str]]:
        """Complete texts until `stop`; return the tokens of prompts and answers, as their client counts them."""
        strategy, used = STRATEGIES[number % 3], Counter[tuple[str, str]]()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
            while not stop.is_set():
                usage = client.completions.create(
                    model=server.model, prompt=f"Ann and {number}", max_tokens=60, extra_body={"kv_cache": strategy}
                ).usage
                assert usage is not None
                used[strategy, "prompt_tokens"] += usage.prompt_tokens
                used[strategy, "generated_tokens"] += usage.completion_tokens
        return used

    url = f"{server.url}/v1/live/events"
    with (
        ThreadPoolExecutor(6) as pool,
        ExitStack() as ending,
        httpx.stream("GET", url, headers=ADMIN, timeout=PATIENCE) as response,
    ):
        ending.callback(stop.set)  # also if the test fails: the pool waits for the loads
        loads = [pool.submit(load, number) for number in range(6)]
        events = read_events(response)
        name, state = next(events)
        assert name == "snapshot"
        first, seen, num_changes = state["totals"]["instances"], set[str](), 0
        while num_changes < 8 or seen != set(STRATEGIES):
            state = follow(events, state)
            num_changes += 1
            seen |= {each["instance"] for each in state["requests"].values()}
            assert state["num_running"] <= state["max_num_seqs"]
        stop.set()
        used = sum((each.result() for each in loads), Counter[tuple[str, str]]())
        ended = time.time()
        # No request may run in a state that is older than the last answers, either: all clients may pause at once.
        while state["created"] <= ended + 0.001:  # it is rounded to milliseconds
            state = follow(events, state)
        latest = read_live(server)
        assert state | {"created": latest["created"]} == latest
        assert not state["requests"]
        text = server.metrics()
        for strategy, totals in latest["totals"]["instances"].items():
            for total in ("prompt_tokens", "generated_tokens"):
                assert totals[total] - first[strategy][total] == used[strategy, total]
            for total, name in TOTALS.items():
                assert totals[total] == metric(text, name, strategy=strategy)
            for histogram in ("time_to_first_token", "inter_token_latency"):
                assert sum(totals[histogram]) == metric(text, f"kvmux_{histogram}_seconds_count", strategy=strategy)
                assert len(totals[histogram]) == len(latest["totals"]["bounds"][histogram]) + 1


# ---------------------------------------------------------------- prefixes
def complete(server: Server, prompt: list[int]) -> int:
    """Compute a prompt, and return how many of its tokens were cached."""
    answer = server.complete(prompt=prompt, max_tokens=1, kv_cache="paged", cache_salt="tree")
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def read_tree(server: Server) -> dict[str, dict[str, Any]]:
    """Return the nodes of this test's salt by id."""
    answer = httpx.get(f"{server.url}/v1/live/prefixes", headers=ADMIN, timeout=PATIENCE).json()
    assert answer["instances"]["paged"]["omitted"] == 0
    nodes = answer["instances"]["paged"]["prefixes"]
    return {each["id"]: each for each in nodes if each.get("cache_salt") == "tree"}


def administer(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, f"{server.url}/v1/kv_cache/{path}", json=body, headers=ADMIN, timeout=PATIENCE)


def test_a_tree_of_two_prompts_is_shown_pinned_and_dropped(server: Server) -> None:
    common = [5 + i % 40 for i in range(64)]
    prompts = [[*common, *[token] * 40] for token in (50, 60)]
    assert [complete(server, prompt) for prompt in prompts] == [0, 64]
    administer(server, "POST", "contiguous/clear")  # a command, after which the tree is read anew
    parent, *children = read_tree(server).values()
    assert (parent["tokens"], parent["hits"], parent["pins"]) == (64, 1, [])
    assert "parent" not in parent
    assert [(each["parent"], each["first_token"], each["tokens"]) for each in children] == [(parent["id"], 64, 32)] * 2

    pin = administer(server, "POST", "paged/pins", {"prefix": children[0]["id"], "ttl": 600}).json()
    assert pin["tokens"] == 96
    assert read_tree(server)[children[0]["id"]]["pins"] == [pin["id"]]
    assert administer(server, "POST", "paged/clear", {"cache_salt": "another"}).json() == {"freed_bytes": 0}
    assert pin["id"] in [each["id"] for each in administer(server, "GET", "paged").json()["pins"]]
    assert read_tree(server)[children[0]["id"]]["pins"] == [pin["id"]]

    tree, states = read_tree(server), base64.b64decode(read_live(server)["regions"]["paged/0"]["states"])
    blocks = [read_block(server, block) for block, state in enumerate(states) if state]
    ends = [each for each in blocks if each.get("prefix") in tree]
    assert {(each["first_token"], each["num_pins"]) for each in ends} == {(32, 1), (64, 1), (64, 0)}

    dropped = administer(server, "DELETE", f"paged/prefixes/{children[0]['id']}").json()
    assert (dropped["id"], dropped["freed_bytes"]) == (children[0]["id"], children[0]["bytes"])
    assert children[0]["id"] not in read_tree(server)
    assert complete(server, prompts[0]) == 64
    administer(server, "DELETE", f"paged/prefixes/{parent['id']}")
    assert read_tree(server) == {}
    assert complete(server, prompts[1]) == 0
    assert administer(server, "DELETE", f"paged/prefixes/{parent['id'][::-1]}").status_code == 404
    assert administer(server, "DELETE", f"contiguous/prefixes/{parent['id']}").status_code == 409
    assert administer(server, "POST", "paged/pins", {"prefix": "abc", "ttl": 1}).json()["error"]["code"] == "cannot_pin"


def read_block(server: Server, block: int) -> dict[str, Any]:
    """Return the description of a block of the strategy `paged`."""
    url = f"{server.url}/v1/live/blocks/paged/0/{block}"
    found: dict[str, Any] = httpx.get(url, headers=ADMIN, timeout=PATIENCE).json()
    return found


def test_an_operator_ends_a_request_that_streams(server: Server) -> None:
    body = {"model": server.model, "prompt": "Tom sings", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        eventually(lambda: read_live(server)["requests"])  # the state is up to half a second old
        (key,) = read_live(server)["requests"]
        answer = httpx.delete(f"{server.url}/v1/live/requests/{key}", headers=ADMIN, timeout=PATIENCE)
        assert answer.json()["deleted"]
        *_, last, done = (line for line in lines if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "ended_by_operator"
        assert done == "data: [DONE]"
    eventually(lambda: not read_live(server)["requests"])
