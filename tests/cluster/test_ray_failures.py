"""Replicas that die, are busy, or are replaced while clients wait: what each client gets, and what stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.ray_cluster import Cluster, running
from tests.end_to_end.server_process import PATIENCE, eventually

pytestmark = pytest.mark.ray

NUM_REPLICAS = 4
FLAGS = ("--kv-memory", "32MiB", "--max-num-seqs", "8", "--drain-seconds", "30", "--max-seq-len", "1024")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("--replicas", str(NUM_REPLICAS), *FLAGS) as started:
        started.wait_for_replicas(NUM_REPLICAS)
        yield started


async def iter_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream; the last of a complete one is {"done": True}."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            yield {"done": True}
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def stream(
    client: httpx.AsyncClient,
    max_tokens: int,
    *,
    read: int | None = None,
    begun: asyncio.Event | None = None,
    path: str = "",
) -> str:
    """Stream a completion, and disconnect after `read` events (None: read all); return how it ended.

    `begun` is set once the first event has arrived. `path` is that of a replica; empty: the router chooses.
    """
    body = {"prompt": f"{random.getrandbits(64):x} Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    async with client.stream("POST", f"{path}/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return str(response.status_code)
        events: list[dict[str, Any]] = []
        async for event in iter_events(response):
            events.append(event)
            if begun is not None:
                begun.set()
            if len(events) == read:
                return "disconnected"
        if any("error" in event for event in events):
            return "error"
        return "complete" if events and events[-1].get("done") else "cut off"


def run_streams(cluster: Cluster, *streams: tuple[int, int | None]) -> list[str]:
    """Run streams of (max_tokens, read) at once; return how each ended."""

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE, limits=limits) as client:
            return await asyncio.gather(*(stream(client, tokens, read=read) for tokens, read in streams))

    return asyncio.run(run())


def is_idle(cluster: Cluster) -> bool:
    """Return whether no replica has a request, and none holds memory in use."""
    return not (
        cluster.metric("kvmux_num_requests_running")
        or cluster.metric("kvmux_num_requests_waiting")
        or cluster.metric("kvmux_kv_cache_bytes", state="used")
    )


def test_disconnects_leave_nothing_behind(cluster: Cluster) -> None:
    lengths = [(random.randrange(20, 400), random.choice([None, 1, 3, 10, 30])) for _ in range(50)]
    ended = Counter(run_streams(cluster, *lengths))
    assert ended["disconnected"] > 10, ended
    assert set(ended) <= {"disconnected", "complete"}, ended
    eventually(lambda: is_idle(cluster))


def test_a_killed_replica_costs_its_own_requests_only(cluster: Cluster) -> None:
    """Its streams end with an error; those of others go on, later ones begin elsewhere, and it is replaced."""
    before = cluster.wait_for_replicas(NUM_REPLICAS)
    victim, *others = random.sample(before, NUM_REPLICAS)
    process, engine = cluster.find_replica_process(victim), cluster.find_engine(victim)

    async def kill_under_load() -> tuple[list[str], list[str], list[str]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE, limits=limits) as client:

            async def begin(replica: str) -> list[asyncio.Task[str]]:
                begun = [asyncio.Event() for _ in range(5)]
                path = f"/replicas/{replica}"
                streams = [asyncio.create_task(stream(client, 900, begun=each, path=path)) for each in begun]
                for each in begun:
                    await each.wait()
                return streams

            lost = await begin(victim)
            engine.suspend()  # else its streams may have ended before it is killed
            kept = [task for each in others for task in await begin(each)]
            process.kill()
            later = [asyncio.create_task(stream(client, 20)) for _ in range(20)]
            return await asyncio.gather(*lost), await asyncio.gather(*kept), await asyncio.gather(*later)

    lost, kept, later = map(Counter, asyncio.run(kill_under_load()))
    assert (lost, kept, later) == ({"error": 5}, {"complete": 15}, {"complete": 20})
    after = set(cluster.wait_for_replicas(NUM_REPLICAS))
    assert len(after.intersection(before)) == NUM_REPLICAS - 1
    eventually(lambda: is_idle(cluster))


def test_a_killed_engine_is_restarted_in_its_replica(cluster: Cluster) -> None:
    before = set(cluster.wait_for_replicas(NUM_REPLICAS))
    cluster.find_engine(random.choice(sorted(before))).kill()
    assert Counter(run_streams(cluster, *[(20, None)] * 24)) == {"complete": 24}
    eventually(lambda: set(cluster.list_replicas()) == before)


@contextmanager
def slowed_down(process: psutil.Process) -> Iterator[None]:
    """Have a process run for a tenth of the time until the block ends."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            process.suspend()
            stop.wait(0.18)
            process.resume()
            stop.wait(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def count_served(cluster: Cluster, *, num_clients: int, num_requests: int) -> Counter[str]:
    """Return how many requests each replica has served, all with prompts of their own."""

    async def run() -> Counter[str]:
        served = Counter[str]()
        left = iter(range(num_requests))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE) as client:

            async def load() -> None:
                for _ in left:
                    body = {"prompt": f"{random.getrandbits(64):x}", "max_tokens": 60, "ignore_eos": True}
                    response = await client.post("/v1/completions", json=body | {"explain": True})
                    served[response.json()["choices"][0]["kv_cache"]["routed"]["replica"]] += 1

            await asyncio.gather(*(load() for _ in range(num_clients)))
        return served

    return asyncio.run(run())


def test_a_slow_replica_gets_less_work(cluster: Cluster) -> None:
    slow, *others = cluster.wait_for_replicas(NUM_REPLICAS)
    with slowed_down(cluster.find_engine(slow)):
        served = count_served(cluster, num_clients=16, num_requests=200)
    assert served.total() == 200
    assert served[slow] < 0.5 * mean(served[each] for each in others), (slow, served)


def test_a_replica_that_hangs_keeps_no_others_from_serving(cluster: Cluster) -> None:
    hanging, *others = cluster.wait_for_replicas(NUM_REPLICAS)
    process = cluster.find_replica_process(hanging)
    process.suspend()
    try:
        eventually(lambda: sorted(cluster.list_replicas()) == others)
        served = count_served(cluster, num_clients=4, num_requests=40)
        assert set(served) <= set(others), (hanging, served)
        instances = cluster.get_json("/v1/kv_cache")["data"]
        assert {each["replica"] for each in instances} == set(others)
        api_process = cluster.find_api_process()
        psutil.Process(api_process).kill()
        eventually(lambda: cluster.find_api_process() != api_process)
        eventually(lambda: cluster.get("/v1/replicas").status_code == 200)
        eventually(lambda: sorted(cluster.list_replicas()) == others)  # also for one that has never known the other
        assert set(count_served(cluster, num_clients=4, num_requests=40)) <= set(others)
    finally:
        process.resume()
    cluster.wait_for_replicas(NUM_REPLICAS)


def test_an_update_loses_no_started_answer(cluster: Cluster) -> None:
    """All replicas and API processes are replaced, with other settings, while clients come and go.

    A page that is open follows the live state meanwhile: its stream ends, so that it keeps no process from ending.
    """
    before = set(cluster.list_replicas())

    async def load(client: httpx.AsyncClient, until: asyncio.Event) -> list[str]:
        ended = []
        while not until.is_set():
            ended.append(await stream(client, random.randrange(20, 300)))
        return ended

    async def watch(client: httpx.AsyncClient) -> int:
        async with client.stream("GET", "/v1/live/events") as response:  # raises an error if it is cut off
            return len([line async for line in response.aiter_lines() if line.startswith("event: ")])

    async def update_under_load() -> Counter[str]:
        limits = httpx.Limits(max_connections=None)
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE, limits=limits) as client:
            clients = [asyncio.create_task(load(client, done)) for _ in range(8)]
            watching = asyncio.create_task(watch(client))
            await asyncio.sleep(1.0)
            result = await asyncio.to_thread(
                cluster.update, NUM_REPLICAS, *FLAGS, "--max-queued-requests", "99", "--threads", "1"
            )
            await asyncio.sleep(1.0)
            done.set()
            ended = [outcome for each in clients for outcome in await each]
            assert await watching > 1
        assert result.returncode == 0, result.stderr
        return Counter(ended)

    ended = asyncio.run(update_under_load())
    assert set(ended) == {"complete"}, ended
    assert not before & set(cluster.wait_for_replicas(NUM_REPLICAS))
    assert cluster.get_json("/v1/settings")["max_queued_requests"] == 99


def test_api_processes_share_what_replicas_report() -> None:
    """A router knows what it has sent itself at once, and what others have sent once the replicas have reported it."""
    with running("--replicas", "2", "--workers", "2", "--kv-memory", "64MiB") as cluster:
        cluster.wait_for_replicas(2)
        prompt = f"{random.getrandbits(64):x} " + "Once upon a time there was a king. " * 50

        def ask() -> dict[str, Any]:
            found = cluster.complete(prompt=prompt, max_tokens=1, explain=True)["choices"][0]["kv_cache"]
            return {**found["routed"], "cached_tokens": found["cached_tokens"]}

        first = ask()
        time.sleep(4.0)  # longer than a period of the statistics
        again = [ask() for _ in range(16)]
        assert {each["replica"] for each in again} == {first["replica"]}
        assert {each["reason"] for each in again} == {"cached"}
        assert all(each["expected_cached_tokens"] == each["cached_tokens"] > 100 for each in again)
