"""Chats of several tenants at a time, and the figures of all their answers."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tools.bench.replicas.stream import TIMEOUT, Answer, ask

WORDS = ("king", "river", "old", "boat", "market", "winter", "seven", "garden", "letter", "stone", "bread", "night")


@dataclass
class Round:
    """The answers of all chats, served in one way."""

    answers: list[Answer] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the round."""
        load: Counter[str] = Counter()
        for each in self.answers:
            load[each.replica] += each.computed_tokens + each.output_tokens
        expected = [
            each.expected_tokens == each.cached_tokens for each in self.answers if each.expected_tokens is not None
        ]
        return {
            "requests": len(self.answers),
            "prompt_tokens": sum(each.prompt_tokens for each in self.answers),
            "computed_tokens": sum(each.computed_tokens for each in self.answers),
            "right_expectations": sum(expected) / len(expected) if expected else None,
            "load_max_over_mean": max(load.values()) / statistics.mean(load.values()) if len(load) > 1 else None,
            "ttft_p50": statistics.median(each.first_token for each in self.answers),
            "ttft_p95": statistics.quantiles((each.first_token for each in self.answers), n=20)[-1],
        }

    def times_by_turn(self) -> dict[tuple[int, int], float]:
        """Return the seconds to the first token of each turn."""
        return {each.turn: each.first_token for each in self.answers}


@dataclass(frozen=True)
class ChatLoad:
    """Chats that run at a time: those of a tenant begin alike, and each turn repeats the whole chat before it."""

    tenants: int
    chats: int
    turns: int
    output_tokens: int
    pause: float  # mean seconds between an answer and the next turn
    beginning_words: int  # of the system prompt, which a tenant's chats have in common
    seed: int

    async def run(self, url: str, choose_path: Callable[[], str]) -> Round:
        """Run all chats; `choose_path` returns the beginning of the path for each request."""
        draw, found = random.Random(self.seed), Round()
        beginnings = [_make_text(draw, self.beginning_words) for _ in range(self.tenants)]
        seeds = [draw.randrange(1 << 32) for _ in range(self.chats)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
            await asyncio.gather(
                *(
                    self._chat(client, choose_path, i, beginnings[i % self.tenants], random.Random(each), found)
                    for i, each in enumerate(seeds)
                )
            )
        return found

    async def _chat(
        self,
        client: httpx.AsyncClient,
        choose_path: Callable[[], str],
        chat: int,
        beginning: str,
        draw: random.Random,
        found: Round,
    ) -> None:
        messages = [{"role": "system", "content": beginning}]
        await asyncio.sleep(draw.uniform(0, 4 * self.pause))
        for turn in range(self.turns):
            messages.append({"role": "user", "content": _make_text(draw, draw.randrange(8, 30))})
            body = {
                "messages": messages,
                "max_tokens": self.output_tokens,
                "cache_salt": f"tenant {chat % self.tenants}",
            }
            answer = await ask(client, f"{choose_path()}/v1/chat/completions", body)
            found.answers.append(replace(answer, turn=(chat, turn)))
            messages.append({"role": "assistant", "content": answer.text})
            await asyncio.sleep(draw.expovariate(1 / self.pause))


def _make_text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(num_words))
