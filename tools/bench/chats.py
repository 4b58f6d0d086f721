"""Chats of several tenants at a time, streamed, and the figures of all their answers."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tools.bench.runner import Reading, Row
from tools.server_process import RunError

WORDS = ("king", "river", "old", "boat", "market", "winter", "seven", "garden", "letter", "stone", "bread", "night")
TIMEOUT = 120.0  # seconds that a request may take


@dataclass(frozen=True)
class Answer:
    """A streamed answer, with what the server said of its prompt."""

    turn: tuple[int, int]  # number of the chat, and of the turn in it
    text: str
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int | None  # cached tokens that the router expected; None: there is no router
    output_tokens: int
    replica: str
    first_token: float  # seconds from sending the request

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def read_answers(answers: Sequence[Answer]) -> Iterator[Reading]:
    """Yield the figures of all answers, and the time to the first token of each, in the order of chats and turns."""
    load: Counter[str] = Counter()
    for each in answers:
        load[each.replica] += each.computed_tokens + each.output_tokens
    expected = [each.expected_tokens == each.cached_tokens for each in answers if each.expected_tokens is not None]
    yield Reading(Row("prompt tokens"), sum(each.prompt_tokens for each in answers))
    yield Reading(Row("prompt tokens computed", "tokens"), sum(each.computed_tokens for each in answers))
    if expected:
        right = 100 * sum(expected) / len(expected)
        yield Reading(Row("requests with as many cached tokens as expected", "%", False), right)
    if len(load) > 1:
        yield Reading(Row("busiest replica against the mean"), max(load.values()) / statistics.mean(load.values()))
    for each in sorted(answers, key=lambda each: each.turn):
        yield Reading(Row("time to first token", "ms"), 1e3 * each.first_token)


@dataclass(frozen=True)
class ChatLoad:
    """Chats that run at a time: those of a tenant begin alike, and each turn repeats the whole chat before it."""

    tenants: int
    chats: int
    chat_turns: int
    output_tokens: int
    pause: float  # mean seconds between an answer and the next turn
    beginning_words: int  # of the system prompt, which a tenant's chats have in common
    seed: int

    async def run(self, url: str, choose_path: Callable[[], str]) -> list[Answer]:
        """Run all chats; `choose_path` returns the beginning of the path for each request. Raises RunError."""
        draw, found = random.Random(self.seed), list[Answer]()
        beginnings = [_make_text(draw, self.beginning_words) for _ in range(self.tenants)]
        seeds = [draw.randrange(1 << 32) for _ in range(self.chats)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:

            async def chat(number: int, draw: random.Random) -> None:
                tenant = number % self.tenants
                messages = [{"role": "system", "content": beginnings[tenant]}]
                await asyncio.sleep(draw.uniform(0, 4 * self.pause))
                for turn in range(self.chat_turns):
                    messages.append({"role": "user", "content": _make_text(draw, draw.randrange(8, 30))})
                    body = {"messages": messages, "max_tokens": self.output_tokens, "cache_salt": f"tenant {tenant}"}
                    answer = await _ask(client, f"{choose_path()}/v1/chat/completions", body, (number, turn))
                    found.append(answer)
                    messages.append({"role": "assistant", "content": answer.text})
                    await asyncio.sleep(draw.expovariate(1 / self.pause))

            await asyncio.gather(*(chat(number, random.Random(seed)) for number, seed in enumerate(seeds)))
        return found


def _make_text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


async def _ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], turn: tuple[int, int]) -> Answer:
    """Stream a chat completion, and return it. Raises RunError for an error."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "explain": True, "temperature": 0}
    sent, first, text = time.perf_counter(), None, ""
    last, usage = dict[str, Any](), dict[str, Any]()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            error = (await response.aread()).decode()[:300]
            raise RunError(f"a request was answered {response.status_code}: {error}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RunError(f"a request failed: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if text else None)
                last = choice.get("kv_cache") or last
    routed, cached = last.get("routed") or {}, last["cached_tokens"]
    expected, replica = routed.get("expected_cached_tokens"), routed.get("replica", "")
    seconds = (first or time.perf_counter()) - sent
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(turn, text, tokens[0], cached, expected, tokens[1], replica, seconds)
