"""Roll-outs judged by real text: keys and values in fewer bits arrive, a window that forgets is rolled back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.end_to_end.server_process import Server
from tests.patience import PATIENCE, eventually
from tests.real.model_files import find_model, read_long_text
from tests.real.serving import SETTINGS, serving_every_kind
from tools.server_process import run_module

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TOKEN = "an-operators-secret-token"
CLIENTS = 3
MODEL = "qwen-0.5b"
INSTANCES = {
    "small": {"preset": "small"},
    "window-128": {"kind": "sliding_window", "window": 128},
}
# Wider than in docs/operations/rollouts.md, as few tokens are compared; times of few requests say nothing.
GUARD = {"kl_mean": 0.02, "top1": 0.9, "min_requests": 12, "ttft_p95_ratio": "off", "itl_p95_ratio": "off"}
# Both divergences are means over some hundred tokens, of texts that are drawn
AGREEMENT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ("--admin-token", TOKEN, "--rollouts-file", str(folder / "rollouts.json"))
    with serving_every_kind(MODEL, folder, *flags, instances=INSTANCES) as server:
        yield server


def test_small_arrives_and_a_window_is_rolled_back(server: Server, folder: Path, rng: random.Random) -> None:
    stages = {"shadow": "50%", "canary": ["50%", "100%"], "hold": 1, "guard": GUARD}
    with _under_load(server, rng):
        _command(server, "/v1/rollouts", name="fewer-bits", **{"from": "paged", "to": "small"}, **stages)
        eventually(lambda: _show(server, "fewer-bits")["state"] in ("complete", "rolled_back"), patience=900)
    arrived = _show(server, "fewer-bits")
    print("small:", arrived["fidelity"])
    assert arrived["state"] == "complete", arrived
    live, offline = arrived["fidelity"]["kl_mean"]["value"], _evaluate(folder, rng)
    print(f"mean KL divergence of small: {live:.4f} nats live, {offline:.4f} offline")
    assert offline / AGREEMENT < live < offline * AGREEMENT
    with _under_load(server, rng):
        _command(server, "/v1/rollouts", name="window", **{"from": "small", "to": "window-128"}, **stages)
        eventually(lambda: _show(server, "window")["state"] in ("complete", "rolled_back"), patience=900)
    back = _show(server, "window")
    print("window-128:", back["fidelity"], back["reason"])
    assert back["state"] == "rolled_back", back
    assert "KL divergence" in back["reason"] or "likeliest" in back["reason"]
    after = server.complete(prompt="What comes after a roll-back?", max_tokens=1).json()["kv_cache"]
    assert after["instance"] == "small", "the first roll-out is still complete"


def _evaluate(folder: Path, rng: random.Random) -> float:
    """Return the mean KL divergence of `small` from `paged` that `kvmux evaluate` finds, with the server's settings."""
    text, report, all_of_it = folder / "text.txt", folder / "report.json", read_long_text()
    begin = rng.randrange(len(all_of_it) - 100_000)
    text.write_text(all_of_it[begin : begin + 100_000])
    flags = ["--config", str(folder / SETTINGS), "--model", str(find_model(MODEL)), "--strategy", "paged"]
    flags += ["--strategy", "small", "--text", str(text), "--texts", "12", "--length", "600", "--last", "300"]
    run_module("server", "evaluate", *flags, "--records", "0", "--json", str(report))
    exact, small = json.loads(report.read_text())["strategies"]
    assert (exact["name"], small["name"]) == ("paged", "small")
    return float(small["text"]["kl_nats"])


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
