"""A text five times as long as the model's context, over HTTP: it goes on in constant memory, and makes sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server_process import PATIENCE, Server, serving

CONTEXT = 1024  # half of the model's
SETTINGS = f"""
max_seq_len = {CONTEXT}
max_num_seqs = 2
kv_memory = "64MiB"

[strategies.streaming]
kind = "streaming"
window = 256
every = 64
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("settings") / "kvmux.toml"
    Path(file).write_text(SETTINGS)
    with serving("--config", str(file), "--dtype", "float32", "--threads", "1") as server:
        yield server


def test_a_stream_goes_on_past_the_context(server: Server) -> None:
    count = 5 * CONTEXT
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": count, "kv_cache": "streaming"}
    body |= {"temperature": 0.7, "seed": 4, "ignore_eos": True, "stream": True, "logprobs": 0, "explain": True}
    body |= {"stream_options": {"include_usage": True}}
    scores: list[float] = []
    usage, record, largest = {}, {}, 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                record = choice.get("kv_cache") or record
                if choice.get("logprobs"):
                    before = len(scores) // 1000
                    scores += choice["logprobs"]["token_logprobs"]
                    if len(scores) // 1000 > before:
                        largest = max(largest, server.usage("streaming")["reserved"])
    assert len(scores) == usage["completion_tokens"] == count
    assert record["peak_kv_bytes"] >= largest > 0
    first, last = (-sum(part) / len(part) for part in (scores[:CONTEXT], scores[-CONTEXT:]))
    assert last < first + 0.25, "its own words surprise the model more and more"


@pytest.mark.parametrize("strategy", ["paged", "sliding_window"])
def test_strategies_that_keep_positions_of_the_text_cannot(server: Server, strategy: str) -> None:
    answer = server.complete(prompt="Once upon a time", max_tokens=5 * CONTEXT, kv_cache=strategy)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "under strategy 'streaming' only the prompt has to fit" in answer.json()["error"]["message"]
