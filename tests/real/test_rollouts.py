"""Roll-outs judged by real text: int8 keys and values arrive, a window that forgets is rolled back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest

from tests.end_to_end.server_process import Server
from tests.patience import PATIENCE, eventually
from tests.real.model_files import read_long_text
from tests.real.serving import serving_every_kind

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TOKEN = "an-operators-secret-token"
CLIENTS = 3
INSTANCES = {
    "int8": {"kind": "paged", "k_dtype": "int8", "v_dtype": "int8"},
    "window-128": {"kind": "sliding_window", "window": 128},
}
# Wider than in docs/operations/rollouts.md, as few tokens are compared; times of few requests say nothing.
GUARD = {"kl_mean": 0.02, "top1": 0.9, "min_requests": 12, "ttft_p95_ratio": "off", "itl_p95_ratio": "off"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("rollouts")
    flags = ("--admin-token", TOKEN, "--rollouts-file", str(folder / "rollouts.json"))
    with serving_every_kind("qwen-0.5b", folder, *flags, instances=INSTANCES) as server:
        yield server


def test_int8_arrives_and_a_window_is_rolled_back(server: Server, rng: random.Random) -> None:
    stages = {"shadow": "50%", "canary": ["50%", "100%"], "hold": 1, "guard": GUARD}
    with _under_load(server, rng):
        _command(server, "/v1/rollouts", name="small", **{"from": "paged", "to": "int8"}, **stages)
        eventually(lambda: _show(server, "small")["state"] in ("complete", "rolled_back"), patience=900)
    arrived = _show(server, "small")
    print("int8:", arrived["fidelity"])
    assert arrived["state"] == "complete", arrived
    with _under_load(server, rng):
        _command(server, "/v1/rollouts", name="window", **{"from": "int8", "to": "window-128"}, **stages)
        eventually(lambda: _show(server, "window")["state"] in ("complete", "rolled_back"), patience=900)
    back = _show(server, "window")
    print("window-128:", back["fidelity"], back["reason"])
    assert back["state"] == "rolled_back", back
    assert "KL divergence" in back["reason"] or "likeliest" in back["reason"]
    after = server.complete(prompt="What comes after a roll-back?", max_tokens=1).json()["kv_cache"]
    assert after["instance"] == "int8", "the first roll-out is still complete"


@contextmanager
def _under_load(server: Server, rng: random.Random) -> Iterator[None]:
    """Let clients continue pieces of real text while the block runs; all must be answered."""
    stopping, text = Event(), read_long_text()

    def send(own: random.Random) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            while not stopping.is_set():
                begin = own.randrange(len(text) - 4_000)
                prompt = text[begin : begin + own.randrange(1_200, 3_000)]  # 300 to 900 tokens
                body: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
                answer = client.post("/v1/completions", json=body | {"user": f"user {own.randrange(1_000)}"})
                assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(send, random.Random(rng.random())) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            stopping.set()
        for client in clients:
            client.result(PATIENCE)


def _command(server: Server, path: str, **body: Any) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text


def _show(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/v1/rollouts/{name}").json()
    return found
