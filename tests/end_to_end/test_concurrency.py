"""Many clients at once on a small, busy server whose steps fail and whose operator interferes: every answer is right.

Right is what the contiguous baseline answered when nobody else was there; under a window, what the same instance did.
The engine checks its books after every step (tests/end_to_end/checked_engine.py) and ends if they do not add up.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from server.processes.supervisor import Targets
from tests.end_to_end.server_process import PATIENCE, Server, eventually, metric, serving

TOKEN = "an operator's token"
INSTANCES = ("paged", "pairs", "contiguous", "sliding_window")
CLIENTS, REQUESTS, ORDERS = 6, 20, 30
COUNTS = (1, 5, 20)
NOT_SHRUNK = (Phase.reuse, Phase.generate)  # a smaller seed is nothing simpler
# So little memory that requests are preempted, however quick the machine is.
CONFIG = f"""
dtype = "float32"
threads = 1
max_seq_len = 256
max_num_seqs = 8
max_num_batched_tokens = 48
max_queued_requests = 200
kv_memory = "2MiB"
kv_overcommit = 4
admin_token = "{TOKEN}"

[strategies.pairs]
kind = "paged"
block_size = 8
eviction = "s3fifo"
"""


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(1000 * count + seed)
    return [draw.randrange(2, 300) for _ in range(count)]


COMMON = ids(150, 0)
PROMPTS = [*(COMMON[:n] for n in (1, 33, 64, 150)), *(COMMON[:n] + ids(30, n) for n in (20, 64, 100, 140)), ids(90, 1)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "kvmux.toml"
    config.write_text(CONFIG)
    with serving("--config", str(config), targets=Targets("tests.end_to_end.checked_engine:run")) as running:
        yield running


class Answers:
    """What a prompt must be answered with, asked for when nobody else is there."""

    def __init__(self, server: Server) -> None:
        self._known: dict[tuple[int, bool, bool], list[str]] = {}
        for prompt in range(len(PROMPTS)):
            for drawn in (False, True):
                for window in (False, True):
                    instance = "sliding_window" if window else "contiguous"
                    body = asked(prompt, max(COUNTS), drawn, kv_cache=instance, skip_reading_prefix_cache=True)
                    told = server.complete(**body, n=3 if drawn else 1).json()
                    self._known[prompt, drawn, window] = [choice["text"] for choice in told["choices"]]

    def assert_right(self, body: dict[str, Any], choice: int, text: str, *, whole: bool) -> None:
        drawn = body["temperature"] > 0
        prompt = PROMPTS.index(body["prompt"])
        known = self._known[prompt, drawn, body["kv_cache"] == "sliding_window"][choice if drawn else 0]
        assert known.startswith(text), body
        if whole and body["max_tokens"] == max(COUNTS):
            assert text == known, body


@pytest.fixture(scope="module")
def answers(server: Server) -> Answers:
    return Answers(server)


def asked(prompt: int, max_tokens: int, drawn: bool, **more: Any) -> dict[str, Any]:
    temperature = 0.9 if drawn else 0.0
    fixed = {"ignore_eos": True, "seed": prompt, "temperature": temperature, "top_k": 10}
    return {"prompt": PROMPTS[prompt], "max_tokens": max_tokens} | fixed | more


class Client:
    """Asks for anything, in any way, and now and then hangs up."""

    def __init__(self, server: Server, http: httpx.AsyncClient, answers: Answers, seed: str) -> None:
        self._http, self._answers = http, answers
        self._model = server.model
        self._draw = random.Random(seed)

    async def run(self) -> None:
        for _ in range(REQUESTS):
            await (self._stream if self._draw.random() < 0.5 else self._complete)(self._body())

    def _body(self) -> dict[str, Any]:
        draw = self._draw
        body = asked(draw.randrange(len(PROMPTS)), draw.choice(COUNTS), drawn := draw.random() < 0.4)
        body |= {"model": self._model, "kv_cache": draw.choice(INSTANCES), "priority": draw.randrange(3)}
        body |= {"n": draw.choice((1, 2, 3)) if drawn else 1, "skip_reading_prefix_cache": draw.random() < 0.1}
        return body | ({"cache_salt": "mine"} if draw.random() < 0.3 else {})

    def _headers(self) -> dict[str, str]:
        return self._draw.choice(({}, {"Authorization": "Bearer somebody"}))

    async def _complete(self, body: dict[str, Any]) -> None:
        answer = await self._http.post("/v1/completions", json=body, headers=self._headers())
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            self._answers.assert_right(body, choice["index"], choice["text"], whole=True)

    async def _stream(self, body: dict[str, Any]) -> None:
        hang_up = self._draw.choice((None, None, 0, 3))
        texts: dict[int, str] = dict.fromkeys(range(body["n"]), "")
        lines = 0
        asking = self._http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=self._headers())
        async with asking as answer:
            async for line in answer.aiter_lines():
                if hang_up is not None and lines >= hang_up:
                    break
                lines += 1
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        texts[choice["index"]] += choice["text"]
        for choice, text in texts.items():
            self._answers.assert_right(body, choice, text, whole=hang_up is None)


class Operator:
    """Gives orders; some are refused, for want of room or of anything to pin."""

    def __init__(self, http: httpx.AsyncClient, seed: str) -> None:
        self._http = http
        self._draw = random.Random(seed)
        self.headers = {"Authorization": f"Bearer {TOKEN}"}

    async def run(self) -> None:
        for _ in range(ORDERS):
            await asyncio.sleep(self._draw.random() / 10)
            url = f"/v1/kv_cache/{self._draw.choice(INSTANCES)}"
            method, path, body = self._draw.choice(
                [
                    ("GET", "", None),
                    ("POST", "/clear", None),
                    ("POST", "/clear", {"cache_salt": "mine"}),
                    ("POST", "/pins", {"prompt": COMMON, "ttl": self._draw.choice((0.01, 60))}),
                    ("PATCH", "", {"limit": self._draw.choice(("40%", "70%", "100%"))}),
                    ("PATCH", "", {"floor": self._draw.choice(("0%", "10%", "30%"))}),
                ]
            )
            answer = await self._http.request(method, url + path, json=body, headers=self.headers)
            assert answer.status_code in (200, 400, 409), answer.text

    async def undo(self) -> None:
        """Lets go of everything."""
        for instance in INSTANCES:
            url = f"/v1/kv_cache/{instance}"
            told = (await self._http.get(url, headers=self.headers)).json()
            for pin in told.get("pins", ()):
                await self._http.delete(f"{url}/pins/{pin['id']}", headers=self.headers)
            await self._http.patch(url, json={"floor": "0%", "limit": "100%"}, headers=self.headers)


@settings(max_examples=2, phases=NOT_SHRUNK)
@given(seed=st.integers(0, 2**32 - 1))
def test_everybody_is_answered_as_if_alone(server: Server, answers: Answers, seed: int) -> None:
    engine = server.engine.pid

    async def all_at_once() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as http:
            operator = Operator(http, f"operator {seed}")
            clients = [Client(server, http, answers, f"client {i} {seed}") for i in range(CLIENTS)]
            async with asyncio.TaskGroup() as group:
                for actor in (*clients, operator):
                    group.create_task(actor.run())
            await operator.undo()

    asyncio.run(all_at_once())

    def all_have_left() -> bool:
        usages = server.usages()
        return not any(usages[instance]["seats"] for instance in INSTANCES)

    eventually(all_have_left)
    usages = server.usages()
    for instance in INSTANCES:
        assert usages[instance]["used"] == 0, "memory of requests that have gone"
    assert server.engine.pid == engine, "the engine has ended and begun again"
    now = server.metrics()
    for name in ("kvmux_strategy_failures_total", "kvmux_forks_total", "kvmux_num_preemptions_total"):
        assert metric(now, name) > 0, name
