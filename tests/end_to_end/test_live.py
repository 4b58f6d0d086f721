"""The live state of a real server under load: changes add up, a request is ended, and nothing is left."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.api.ops.test_live import apply_change, read_events
from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving

TOKEN = "an-operators-secret-token"
ADMIN = {"authorization": f"Bearer {TOKEN}"}

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


def test_changes_add_up_under_load(server: Server) -> None:
    stop = threading.Event()

    def load(number: int) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
            while not stop.is_set():
                strategy = ("paged", "contiguous", "sliding_window")[number % 3]
                client.completions.create(
                    model=server.model, prompt=f"Ann and {number}", max_tokens=60, extra_body={"kv_cache": strategy}
                )

    url = f"{server.url}/v1/live/events"
    with ThreadPoolExecutor(6) as pool, httpx.stream("GET", url, headers=ADMIN, timeout=PATIENCE) as response:
        loads = [pool.submit(load, number) for number in range(6)]
        events = read_events(response)
        name, state = next(events)
        assert name == "snapshot"
        seen: set[str] = set()
        for _ in range(8):
            name, change = next(events)
            assert name == "change"
            state = apply_change(state, change)
            seen |= {each["instance"] for each in state["requests"].values()}
            assert state["num_running"] <= state["max_num_seqs"]
        stop.set()
        for each in loads:
            each.result()
        assert seen == {"paged", "contiguous", "sliding_window"}
        while state["requests"]:
            _, change = next(events)
            state = apply_change(state, change)
        latest = read_live(server)
        assert state["cells"] == latest["cells"]
        assert state["instances"] == latest["instances"]
        assert state["totals"] == latest["totals"]
        text = server.metrics()
        for strategy, totals in latest["totals"]["instances"].items():
            for total, name in TOTALS.items():
                assert totals[total] == metric(text, name, strategy=strategy)
            for histogram in ("time_to_first_token", "inter_token_latency"):
                assert sum(totals[histogram]) == metric(text, f"kvmux_{histogram}_seconds_count", strategy=strategy)
                assert len(totals[histogram]) == len(latest["totals"]["bounds"][histogram]) + 1


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
