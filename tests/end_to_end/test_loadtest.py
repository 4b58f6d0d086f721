"""What our own load tests tell of a server is what it tells of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.server_process import Server, metric
from tests.patience import PATIENCE

STRATEGIES = ("paged", "contiguous", "sliding_window")
COUNTERS = ("kvmux_prompt_tokens_total", "kvmux_prompt_tokens_cached_total", "kvmux_generation_tokens_total")
REQUESTS, SHARED, OWN, ANSWER, WARM_UP_ANSWER = 4, 64, 40, 12, 8


def counted(server: Server) -> dict[str, tuple[int, ...]]:
    """Tokens of prompts, of these found in a cache, and of answers, by strategy."""
    now = server.metrics()
    return {name: tuple(int(metric(now, each, strategy=name)) for each in COUNTERS) for name in STRATEGIES}


def test_bench_counts_as_the_server_does(tiny: Server, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    lengths = ("--shared-tokens", str(SHARED), "--prompt-tokens", str(OWN), "--max-tokens", str(ANSWER))
    how_many = ("--requests", str(REQUESTS), "--rounds", "1", "--concurrency", str(REQUESTS))
    before = counted(tiny)
    command = [sys.executable, "-m", "server", "bench", "--url", tiny.url, *lengths, *how_many, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    after = counted(tiny)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nobody watches, so no bar
    results = {(each["strategy"], each["phase"]): each for each in json.loads(file.read_text())["results"]}
    assert list(results) == [(name, phase) for phase in ("cold", "warm") for name in STRATEGIES]
    for name in STRATEGIES:
        cold, warm = results[name, "cold"], results[name, "warm"]
        prompts, cached, answers = (a - b for a, b in zip(after[name], before[name], strict=True))
        assert cold["prompt_tokens"] == warm["prompt_tokens"] == REQUESTS * (SHARED + OWN)
        assert prompts == 3 * REQUESTS * (SHARED + OWN)  # warming up, too
        assert cold["completion_tokens"] == warm["completion_tokens"] == REQUESTS * ANSWER
        assert answers == 2 * REQUESTS * ANSWER + REQUESTS * WARM_UP_ANSWER
        assert cached >= cold["cached_tokens"] + warm["cached_tokens"]
        assert warm["cached_tokens"] >= (0 if name == "sliding_window" else REQUESTS * SHARED)
        assert cold["cached_tokens"] <= (REQUESTS - 1) * (SHARED + 1)  # one of them had to compute it


@pytest.mark.skipif(not find_spec("locust"), reason="the extra `load` is not installed")
def test_every_kind_of_user_is_served(tiny: Server) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--only-summary"]
    command += ["--host", tiny.url, "--users", "7", "--spawn-rate", "7", "--run-time", "4s", "--stop-timeout", "60"]
    command += ["--max-tokens", "24"]
    left = tiny.metric("kvmux_requests_total", outcome="cancelled")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {(row["method"], row["name"]): row["num_requests"] for row in json.loads(done.stdout)}
    for name in STRATEGIES:
        for kind in ("POST", "TTFT", "tok/s"):
            assert rows[kind, f"tiny:{name}"] > 0
    assert any(rows.get(("CANCEL", f"tiny:{name}")) for name in STRATEGIES)
    assert tiny.metric("kvmux_requests_total", outcome="cancelled") > left
