"""Roll-outs over HTTP, under the load of OpenAI's client: a broken candidate is rolled back, a good one arrives.

The server is killed on the way, and goes on where it was.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from server.cli.main import main
from tests.end_to_end.server_process import PATIENCE, Server, eventually, serving

TOKEN = "an-operators-secret-token"
CLIENTS = 6
WORDS = "the red cup of Ann stands on the table near the door while Tom sings and the dog sleeps".split()  # noqa: SIM905
SETTINGS = f"""
admin_token = "{TOKEN}"
kv_memory = "128MiB"
[strategies.int8]
kind = "paged"
k_dtype = "int8"
v_dtype = "int8"
[strategies.broken]
kind = "sliding_window"
window = 64
sinks = 0
"""
# The times of few requests on a shared machine say nothing
GUARD = {"min_requests": 20, "ttft_p95_ratio": "off", "itl_p95_ratio": "off"}


class Served(NamedTuple):
    """A request that was answered."""

    asked: float  # when, in seconds since 1970
    user: str
    instance: str
    reason: str


@contextmanager
def serving_in(folder: Path) -> Iterator[Server]:
    config = folder / "kvmux.toml"
    config.write_text(f'rollouts_file = "{folder / "rollouts.json"}"\n{SETTINGS}')
    with serving("--config", str(config)) as server:
        yield server


@contextmanager
def under_load(server: Server, served: list[Served], rng: random.Random) -> Iterator[None]:
    """Send completions and chats, long and short, streamed and whole, while the block runs; all must be answered."""
    stopping = Event()
    seeds = [rng.random() for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(_send_requests, server, random.Random(seed), served, stopping) for seed in seeds]
        try:
            yield
        finally:
            stopping.set()
        for client in clients:
            client.result(PATIENCE)


def _send_requests(server: Server, rng: random.Random, served: list[Served], stopping: Event) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        while not stopping.is_set() and (answered := _send_request(client, rng, stopping)) is not None:
            served.append(answered)


def _send_request(client: openai.OpenAI, rng: random.Random, stopping: Event) -> Served | None:
    """Send a request and return how it was served; None if the server was killed meanwhile."""
    asked, user = time.time(), f"user {rng.randrange(200)}"
    text = " ".join(rng.choices(WORDS, k=rng.choice([20, 100, 150])))
    options: dict[str, Any] = {"model": "tiny", "user": user, "max_tokens": rng.randrange(4, 30)}
    options |= {"temperature": rng.choice([0, 1]), "seed": rng.randrange(99), "extra_body": {"ignore_eos": True}}
    try:
        if rng.random() < 0.5:
            first, *_ = client.completions.create(prompt=text, stream=True, **options)
        else:
            messages: Any = [{"role": "user", "content": text}]
            first = client.chat.completions.create(messages=messages, **options)
    except (openai.APIConnectionError, httpx.TransportError):
        if stopping.wait(PATIENCE):
            return None
        raise
    return Served(asked, user, first.kv_cache["instance"], first.kv_cache["reason"])


def command(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(
        f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE
    )
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def show(server: Server, name: str) -> dict[str, Any]:
    return server.get(f"/v1/rollouts/{name}").json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", ["shadow", "canary"])
def test_a_broken_candidate_is_rolled_back_within_50_shadowed_requests(
    first: str, tmp_path: Path, rng: random.Random
) -> None:
    served: list[Served] = []
    with serving_in(tmp_path) as server:
        rollout = {"from": "paged", "to": "broken", "shadow": "30%", "canary": ["50%", "100%"], "guard": GUARD}
        command(server, "/v1/rollouts", name="bad", **rollout)
        if first == "canary":
            command(server, "/v1/rollouts/bad/advance")
        with under_load(server, served, rng):
            eventually(lambda: show(server, "bad")["state"] == "rolled_back")
            wait_for_later_requests(server, "bad", served)
        found = show(server, "bad")
        assert found["fidelity"]["requests"] <= 50
        assert "KL divergence" in found["reason"] or "likeliest" in found["reason"]
        assert f"roll-out bad: {first}" in server.output.read_text()
        assert found["reason"] in server.output.read_text()
        assert server.metric("kvmux_rollout_state", rollout="bad", state="rolled_back") == 1
        assert server.metric("kvmux_rollout_rollbacks_total", rollout="bad") == 1
        assert server.metric("kvmux_shadow_kl_nats_count", served="paged", candidate="broken") > 0
        (pair,) = server.get("/v1/fidelity").json()["data"]
        assert (pair["served"], pair["candidate"]) == ("paged", "broken")
        assert pair["kl_mean"]["low"] <= pair["kl_mean"]["value"] <= pair["kl_mean"]["high"]
    under_candidate = [each for each in served if each.instance == "broken"]
    assert bool(under_candidate) == (first == "canary")
    assert all(each.reason == "rollout bad: canary" for each in under_candidate)
    assert all(each.asked < found["since"] + 1 for each in under_candidate)


def test_a_good_candidate_reaches_all_requests_although_the_server_is_killed(
    tmp_path: Path, rng: random.Random
) -> None:
    served: list[Served] = []
    rollout = {"from": "paged", "to": "int8", "shadow": "30%", "canary": ["20%", "60%", "100%"], "hold": 1.5}
    with serving_in(tmp_path) as server:
        started = command(server, "/v1/rollouts", name="good", **rollout, guard=GUARD)
        assert started["state"] == "shadow"
        with under_load(server, served, rng):
            eventually(lambda: show(server, "good")["stage"] == 1)
            compared = show(server, "good")["fidelity"]["requests"]
            eventually(lambda: show(server, "good")["stage"] == 2)
            before = show(server, "good")
            stopped = time.time()
            _kill(server)
    with serving_in(tmp_path) as server:
        after = show(server, "good")
        assert (after["state"], after["stage"]) == ("canary", 2)
        assert after["fidelity"]["requests"] >= compared >= 20
        assert after["history"][: len(before["history"])] == before["history"]
        with under_load(server, served, rng):
            eventually(lambda: show(server, "good")["state"] == "complete")
            wait_for_later_requests(server, "good", served)
        stages = [change["to"].partition(" (")[0] for change in show(server, "good")["history"]]
        assert stages == ["shadow", "canary 20%", "canary 60%", "canary 100%", "complete"]
        since = show(server, "good")["since"]
        assert {each.instance for each in served if each.asked > since + 1} == {"int8"}
        assert server.metric("kvmux_rollout_share", rollout="good") == 1
    check_stickiness(served)
    assert stopped < since


@pytest.mark.parametrize("file", ["kept", "off"])
def test_roll_outs_go_on_whichever_process_is_killed(tmp_path: Path, file: str) -> None:
    path = tmp_path / "rollouts.json" if file == "kept" else "off"
    config = tmp_path / "kvmux.toml"
    config.write_text(f'rollouts_file = "{path}"\n{SETTINGS}')
    rollout = {"from": "paged", "to": "int8", "canary": ["100%"], "hold": "1h", "guard": GUARD}
    with serving("--config", str(config)) as server:
        assert server.get("/v1/rollouts").json()["data"] == []
        assert find_child(server, "rollouts") is None, "nobody needs it yet"
        command(server, "/v1/rollouts", name="good", **rollout)
        before = command(server, "/v1/rollouts/good/advance")
        assert server.complete(prompt="x", max_tokens=2).json()["kv_cache"]["reason"] == "rollout good: canary"
        # Without a file, the controller's own end would end its roll-outs
        for name in ("engine", "worker-0", *(["rollouts"] if file == "kept" else [])):
            child = find_child(server, name)
            assert child is not None
            child.kill()
            child.wait(PATIENCE)
            eventually(lambda name=name: find_child(server, name) is not None)
            eventually(lambda: server.get("/ready").status_code == 200)
            eventually(lambda: server.get("/v1/rollouts/good").status_code == 200)
            assert show(server, "good")["history"] == before["history"], name
            answer = server.complete(prompt="x", max_tokens=2).json()
            assert answer["kv_cache"] == {"instance": "int8", "reason": "rollout good: canary", "cached_tokens": 0}, (
                name
            )
        assert server.metric("kvmux_rollout_state", rollout="good", state="canary") == 1


def test_a_server_that_stops_does_not_miss_its_engine(tmp_path: Path) -> None:
    rollout = {"from": "paged", "to": "int8", "shadow": "30%", "canary": ["100%"], "guard": GUARD}
    with serving_in(tmp_path) as server:
        command(server, "/v1/rollouts", name="good", **rollout)
        eventually(lambda: show(server, "good")["state"] == "shadow")
        server.process.terminate()
        server.process.wait(PATIENCE)
        printed = server.output.read_text()
    assert "stopping, once running requests have finished" in printed
    assert "WARNING" not in printed


def find_child(server: Server, name: str) -> psutil.Process | None:
    """Return the server's process of this name, if it runs."""
    children = server.process.children()
    return next((child for child in children if child.name() == f"kvmux-{name}"), None)


def wait_for_later_requests(server: Server, name: str, served: list[Served]) -> None:
    """Wait until some requests were served that were asked a second after the roll-out's latest change."""
    since = show(server, name)["since"]
    eventually(lambda: sum(each.asked > since + 1 for each in served) >= CLIENTS)


def check_stickiness(served: list[Served]) -> None:
    """Assert that a user who was served by the candidate once is not served by the baseline later."""
    latest_under_baseline = {each.user: each.asked for each in served if each.instance == "paged"}
    for each in served:
        if each.instance == "int8":
            # Requests that were under way when a stage began are a second of leeway
            assert each.asked > latest_under_baseline.get(each.user, 0.0) - 1, each.user


def _kill(server: Server) -> None:
    """Kill all processes of a server at once, as a machine that loses its power does."""
    processes = [*server.process.children(recursive=True), server.process]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=PATIENCE)


def test_what_a_board_has_measured_is_what_is_watched(tmp_path: Path) -> None:
    """From `kvmux evaluate --board` to a roll-out with the bounds of its figures; others are refused."""
    folder, config = tmp_path / "board", tmp_path / "kvmux.toml"
    sizes = ("--suite", "completion", "--samples", "2", "--texts", "1", "--lengths", "512", "--threads", "1")
    assert main(["evaluate", "--board", str(folder), *sizes, "--strategy", "exact", "--strategy", "small"]) == 0
    cells = {each["strategy"]: each["quality"] for each in json.loads((folder / "board.json").read_text())["cells"]}
    tables = '[strategies.mixed]\npreset = "small"\n[rollouts.mixed]\nfrom = "paged"\nto = "mixed"\nguard = "board"\n'
    config.write_text(f'rollouts_file = "off"\nboard = "{folder}"\n{SETTINGS}{tables}')
    with serving("--config", str(config)) as server:
        eventually(lambda: show(server, "mixed")["settings"]["guard"]["kl_mean"] != 0.05)
        guard = show(server, "mixed")["settings"]["guard"]
        assert guard["kl_p99"] == pytest.approx(3 * max(0.05, cells["small"]["kl_p99"]), abs=1e-5)
        assert guard["top1"] == pytest.approx(1 - 3 * max(0.01, 1 - cells["small"]["top1_agreement"]), abs=1e-5)
        body = {"name": "other", "from": "contiguous", "to": "broken", "guard": "board"}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        refused = httpx.post(f"{server.url}/v1/rollouts", json=body, headers=headers, timeout=PATIENCE)
        assert refused.status_code == 400
        assert "has no strategy with the options of 'broken'; it has exact, small" in refused.text
