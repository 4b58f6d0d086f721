"""Simulates replicas with prefix caches under a routing policy, in virtual time and without a model.

A replica computes prompts one after the other at a fixed speed, and then generates. Its cache is a set of blocks, the
least recently used of which are evicted. It shares no code with the caches of a server.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple
from zlib import crc32

from server.cluster.router import Decision, Hint, RoutingPolicy

BLOCK = 16  # tokens
TOKENS_PER_SECOND = 4000.0  # of prompts
STATISTICS_PERIOD = 1.0  # seconds
STATISTICS_LAG = 0.5  # seconds until routers have them


class Request(NamedTuple):
    """A turn of a chat: the text so far, whose blocks have names that depend on the tenant."""

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
        return {
            "instances": {"paged": instance},
            "queued_tokens": queued,
            "num_requests": len(self.running),
            "report": now,  # another in each report, so that an idle replica does not count as one that hangs
        }


@dataclass
class Outcome:
    """The figures of a simulation."""

    num_computed: int  # prompt tokens
    right_expectations: float  # share of requests that found as many cached tokens as expected
    imbalance: float  # busy seconds of the busiest replica against the mean
    first_tokens: Sequence[float]  # seconds to the first token, by request


class Clock:
    """A clock that tests set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


Choose = Callable[[Hint, Sequence[str]], Decision]


class Simulation:
    """Replicas that serve requests, one policy that knows them, and the time."""

    def __init__(self, replicas: Sequence[SimulatedReplica], choose: Choose | None = None) -> None:
        """Begin at time 0; `choose` takes the place of the policy's own choice."""
        self._replicas = {f"r{i}": each for i, each in enumerate(replicas)}
        self._clock = Clock()
        self._policy = RoutingPolicy(seed=1, clock=self._clock)
        self._choose = choose or self._policy.choose
        self._next_report = 0.0
        self._reports: deque[tuple[float, dict[str, dict[str, Any]]]] = deque()  # on their way: times of arrival
        self._ends: list[tuple[float, str, str]] = []  # heap of running requests: end, id, replica

    def serve(self, request_id: str, request: Request) -> tuple[float, bool]:
        """Serve a request; return the seconds to its first token, and whether it found what was expected."""
        self._go_on_until(request.arrives)
        hint = request.make_hint()
        decision = self._choose(hint, [*self._replicas])
        id = decision.replicas[0]
        is_right = decision.cached_tokens == self._replicas[id].find_cached_tokens(hint)
        self._policy.record_sent(request_id, hint, id)
        first, end = self._replicas[id].serve(hint, request, request.arrives)
        heapq.heappush(self._ends, (end, request_id, id))
        return first - request.arrives, is_right

    def _go_on_until(self, now: float) -> None:
        """Let requests end, and replicas report, until a time."""
        self._clock.now = now
        while self._ends and self._ends[0][0] <= now:
            _, request_id, id = heapq.heappop(self._ends)
            self._policy.record_ended(request_id, id)
        if now >= self._next_report:
            statistics = {id: each.make_statistics(now) for id, each in self._replicas.items()}
            self._reports.append((now + STATISTICS_LAG, statistics))
            self._next_report = now + STATISTICS_PERIOD
        while self._reports and self._reports[0][0] <= now:
            self._policy.update(self._reports.popleft()[1])


def simulate(
    requests: Sequence[Request], replicas: Sequence[SimulatedReplica], choose: Choose | None = None
) -> Outcome:
    """Serve all requests; `choose` takes the place of the policy's own choice, such as by round robin."""
    simulation = Simulation(replicas, choose)
    served = [simulation.serve(str(i), each) for i, each in enumerate(sorted(requests))]
    busy = [each.busy_seconds + 1e-9 for each in replicas]
    return Outcome(
        num_computed=sum(each.num_computed for each in replicas),
        right_expectations=sum(is_right for _, is_right in served) / len(served),
        imbalance=max(busy) / (sum(busy) / len(busy)),
        first_tokens=[seconds for seconds, _ in served],
    )


def make_chats(
    draw: random.Random,
    *,
    tenants: int,
    chats: int,
    turns: int,
    pause: float,
    start_seconds: float = 20.0,
    answer_seconds: tuple[float, float] = (0.2, 1.5),
) -> list[Request]:
    """Return the turns of chats: those of a tenant have the same beginning, and each turn continues the one before.

    Chats start within `start_seconds`; an answer takes some time between the two `answer_seconds`.
    """
    requests = []
    beginnings = [[draw.randrange(1000) for _ in range(draw.randrange(200, 600))] for _ in range(tenants)]
    for _ in range(chats):
        tenant = draw.randrange(tenants)
        text, arrives = list(beginnings[tenant]), draw.uniform(0, start_seconds)
        for _ in range(turns):
            text = text + [draw.randrange(1000) for _ in range(draw.randrange(20, 150))]
            answered = draw.uniform(*answer_seconds)
            requests.append(Request(arrives, f"t{tenant}", tuple(text), answered))
            arrives += answered + 0.5 + pause * draw.uniform(0.5, 2.0)
    return requests


class RoundRobin:
    """Chooses replicas in turn."""

    def __init__(self) -> None:
        self._count = count()

    def __call__(self, hint: Hint, candidates: Sequence[str]) -> Decision:
        return Decision([candidates[next(self._count) % len(candidates)]], "least loaded")
