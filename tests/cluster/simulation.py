"""Simulates replicas with prefix caches under a routing policy, in virtual time and without a model.

A replica computes prompts one after the other at a fixed speed, and then generates. Its cache is a least-recently-used
set of blocks, as exact as that of a server, but written anew for these tests.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

from server.cluster.router import Decision, Hint, RoutingPolicy

BLOCK = 16  # tokens
TOKENS_PER_SECOND = 4000.0  # of prompts
STATISTICS_PERIOD = 1.0  # seconds


class Request(NamedTuple):
    """A request of a chat: the text so far, with the tenant as a part of all its names."""

    arrives: float
    tenant: str
    tokens: Sequence[int]
    answer_seconds: float
    instance: str = "paged"

    def make_hint(self) -> Hint:
        name, names = crc32(f"{self.tenant} {self.instance}".encode()), []
        for end in range(BLOCK, len(self.tokens) + 1, BLOCK):
            name = crc32(array("q", self.tokens[end - BLOCK : end]).tobytes(), name)
            names.append(name)
        return Hint(self.instance, names, BLOCK, len(self.tokens), 64)


@dataclass
class SimulatedReplica:
    """A replica whose cache has room for some blocks."""

    num_blocks: int
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)  # names of blocks, least recently used first
    free_at: float = 0.0  # when the prompts of all its requests are computed
    running: list[float] = field(default_factory=list)  # ends of its requests
    num_computed: int = 0
    busy_seconds: float = 0.0  # of all its requests, added up

    def find_cached_tokens(self, hint: Hint) -> int:
        usable = (hint.num_tokens - 1) // BLOCK
        for i, name in enumerate(hint.names[:usable]):
            if name not in self.cache:
                return i * BLOCK
        return min(usable, len(hint.names)) * BLOCK

    def serve(self, hint: Hint, request: Request, now: float) -> tuple[float, float]:
        """Compute a prompt; return when its first and its last token come."""
        uncached = hint.num_tokens - self.find_cached_tokens(hint)
        self.num_computed += uncached
        self.busy_seconds += uncached / TOKENS_PER_SECOND + request.answer_seconds
        self.free_at = max(self.free_at, now) + uncached / TOKENS_PER_SECOND
        for name in reversed(hint.names):  # the end of a text is evicted before its beginning
            self.cache[name] = None
            self.cache.move_to_end(name)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)
        end = self.free_at + request.answer_seconds
        self.running.append(end)
        return self.free_at, end

    def make_statistics(self, now: float) -> dict[str, Any]:
        """Return what `record_routing_stats` of a real replica returns."""
        self.running = [end for end in self.running if end > now]
        instance = {
            "shares": True,
            "names": array("I", self.cache).tobytes(),
            "free_bytes": self.num_blocks * BLOCK,
            "bytes_per_token": 1.0,
        }
        queued = round(max(0.0, self.free_at - now) * TOKENS_PER_SECOND)
        return {"instances": {"paged": instance}, "queued_tokens": queued, "num_requests": len(self.running)}


@dataclass
class Outcome:
    """What a simulation has found."""

    num_computed: int  # prompt tokens
    right_expectations: float  # share of requests that found what was expected
    imbalance: float  # busy seconds of the busiest replica against the mean
    first_tokens: Sequence[float]  # seconds, by request


Choose = Callable[[Hint, Sequence[str]], Decision]


def simulate(
    requests: Sequence[Request], replicas: Sequence[SimulatedReplica], make_choice: Callable[[], Choose] | None
) -> Outcome:
    """Serve all requests; `make_choice` makes another way to choose than the policy, such as round robin."""
    now = [0.0]
    policy = RoutingPolicy(seed=1, clock=lambda: now[0])
    choose = policy.choose if make_choice is None else make_choice()
    by_id = {f"r{i}": each for i, each in enumerate(replicas)}
    statistics = {id: each.make_statistics(0.0) for id, each in by_id.items()}
    next_report, ends, right = 0.0, list[tuple[float, str, str]](), 0
    first_tokens = []
    for number, request in enumerate(sorted(requests)):
        now[0] = request.arrives
        while ends and ends[0][0] <= now[0]:
            _, ended, id = heapq.heappop(ends)
            policy.record_ended(ended, id)
        if now[0] >= next_report:
            statistics = {id: each.make_statistics(now[0]) for id, each in by_id.items()}
            next_report = now[0] + STATISTICS_PERIOD
        policy.update(statistics)
        hint = request.make_hint()
        decision = choose(hint, [*by_id])
        chosen = decision.replicas[0]
        right += decision.cached_tokens == by_id[chosen].find_cached_tokens(hint)
        policy.record_sent(str(number), hint, chosen)
        first, end = by_id[chosen].serve(hint, request, now[0])
        first_tokens.append(first - now[0])
        heapq.heappush(ends, (end, str(number), chosen))
    busy = [each.busy_seconds + 1e-9 for each in replicas]
    return Outcome(
        sum(each.num_computed for each in replicas),
        right / len(requests),
        max(busy) / (sum(busy) / len(busy)),
        first_tokens,
    )


def make_chats(draw: random.Random, *, tenants: int, chats: int, turns: int, pause: float) -> list[Request]:
    """Return the requests of chats: each tenant has a beginning of its own, each turn continues the one before."""
    requests = []
    beginnings = [[draw.randrange(1000) for _ in range(draw.randrange(200, 600))] for _ in range(tenants)]
    for _ in range(chats):
        tenant = draw.randrange(tenants)
        text, arrives = list(beginnings[tenant]), draw.uniform(0, 20)
        for _ in range(turns):
            text = text + [draw.randrange(1000) for _ in range(draw.randrange(20, 150))]
            requests.append(Request(arrives, f"t{tenant}", tuple(text), draw.uniform(0.2, 1.5)))
            arrives += pause * draw.uniform(0.5, 2.0) + 2.0
    return requests


class RoundRobin:
    """Chooses replicas in turn."""

    def __init__(self) -> None:
        self._count = count()

    def __call__(self, hint: Hint, candidates: Sequence[str]) -> Decision:
        return Decision([candidates[next(self._count) % len(candidates)]], "least loaded")
