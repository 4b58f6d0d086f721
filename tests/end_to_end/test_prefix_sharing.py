"""What requests share is computed once: told by the counters of a running server, not by a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.end_to_end.server_process import PATIENCE, Server, metric

CLIENTS, SHARED, OWN, COUNT = 8, 1024, 64, 4


def ids(count: int, *seed: object) -> list[int]:
    draw = random.Random(str(seed))
    return [draw.randrange(2, 300) for _ in range(count)]


def at_once(server: Server, prompts: Sequence[list[int]], **body: object) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        ask = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True} | body
        answers = list(pool.map(lambda prompt: server.complete(prompt=prompt, **ask), prompts))
    assert {answer.status_code for answer in answers} == {200}
    return answers


def computed(server: Server) -> float:
    """Tokens of prompts that have been computed so far; a token that was generated enters the cache, but the last."""
    now = server.metrics()
    generated = metric(now, "kvmux_generation_tokens_total") - metric(now, "kvmux_requests_total", outcome="length")
    return metric(now, "kvmux_step_tokens_sum") - generated


@pytest.mark.parametrize("own", [OWN, 1])
def test_eight_at_once_compute_their_common_beginning_once(tiny: Server, own: int) -> None:
    beginning = ids(SHARED, "shared", own)
    before = computed(tiny)
    for round_, tokens in (("cold", SHARED + CLIENTS * own), ("warm", CLIENTS * own)):
        at_once(tiny, [beginning + ids(own, round_, i) for i in range(CLIENTS)])
        assert computed(tiny) - before == tokens, round_
        before += tokens


def test_tenants_compute_each_for_themselves(tiny: Server) -> None:
    prompt = ids(100, "tenants")
    before = computed(tiny)
    for key, tokens in (("one", 100), ("two", 100), ("one", 4), ("two", 4)):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": tiny.model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        answer = httpx.post(f"{tiny.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 100 - tokens
        assert computed(tiny) - before == tokens
        before += tokens
