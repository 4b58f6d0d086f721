"""Chooses the replica that serves a request, by what each has cached of its prompt, its queue and its free KV memory.

Knows replicas by their ids and statistics only, and nothing of Ray: serve/request_router.py applies the policy there.

What each replica has cached is known from two sources: the names of resident blocks in its statistics, which are about
a second old, and the prompts that this router has sent there since.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple

from config.block_hashes import NAME_TYPE

# What a request costs at a replica, in prompt tokens: UNCACHED_WEIGHT times those that the replica has to compute, plus
# those that wait there and DECODE_TOKENS for each of its requests. A cost of 100 is as bad as waiting until 100 tokens
# of other prompts are computed. With a larger UNCACHED_WEIGHT replicas are less equally loaded, with larger
# DECODE_TOKENS more prompts are computed again (tests/cluster/simulation.py).
UNCACHED_WEIGHT = 2  # a token that has to be computed takes time, and the place of a cached one
DECODE_TOKENS = 48  # a running request slows others down while it generates
EQUAL_TOKENS = 192  # replicas whose costs differ by fewer tokens are equally good
# A replica that computes a long prompt reports late; one that hangs does not report at all
SILENT_AFTER = 3.0  # seconds by which a replica's report may be older than the newest one of another
SILENCE_TOKENS = 256  # cost of each further second
GRACE = 3.0  # seconds after a request's end in which its prompt counts as cached though no statistics say so yet

Reason = Literal["asked for", "only one", "cached", "conversation", "least loaded", "two choices"]


# ---------------------------------------------------------------- requests and replicas
@dataclass(frozen=True, slots=True)
class Hint:
    """What a router knows of a request. The first argument of calls is a dict with these fields (hints.py)."""

    instance: str | None = None  # strategy instance that will serve it; None: each replica's own rules choose
    # Names of the prompt's full blocks (config/block_hashes.py). The list grows while the answer is generated, so that
    # what was sent to a replica includes the answer
    names: Sequence[int] = ()
    block_size: int = 0  # number of tokens in a block
    num_tokens: int = 0  # of the prompt
    max_tokens: int = 0  # of the answer
    conversation: str = ""  # equal for all requests of a conversation; empty: none
    replica: str | None = None  # id of the replica that has to serve it; None: any
    avoid: Sequence[str] = ()  # ids of replicas that have failed the request, which is tried again

    @classmethod
    def from_dict(cls, found: Any) -> Hint | None:
        """Return the hint that is a call's first argument; None if it is not a hint."""
        if not isinstance(found, Mapping):
            return None
        known = {name: found[name] for name in cls.__slots__ if name in found}
        return cls(**known)


class InstanceState(NamedTuple):
    """An instance of a replica, from its statistics."""

    shares: bool = False  # whether requests may reuse tokens that others have left in its cache
    names: frozenset[int] = frozenset()  # of resident blocks
    free_bytes: int = 0  # KV memory that requests may still take, that of idle blocks included
    bytes_per_token: float = 0.0

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> InstanceState:
        """Return the state that a replica reports (server/engine/live/routing.py)."""
        names = array(NAME_TYPE, found.get("names", b""))
        return cls(bool(found["shares"]), frozenset(names), int(found["free_bytes"]), float(found["bytes_per_token"]))


class SentRequest(NamedTuple):
    """A request that was sent to a replica, whose statistics may not include it yet."""

    hint: Hint
    uncached_tokens: int
    sent_at: float


@dataclass(slots=True)
class ReplicaState:
    """What a router knows of a replica: its latest statistics, and the requests that it has sent there."""

    id: str
    instances: dict[str, InstanceState] = field(default_factory=dict)
    queued_tokens: int = 0  # prompt tokens of its requests that were not computed when it reported
    num_requests: int = 0  # that it had when it reported
    is_ready: bool = True  # False: it has reported that its engine is starting, or starting again
    reported: object = None  # the latest statistics, to see whether newer ones have come
    reported_at: float = float("-inf")
    silence: float = 0.0  # seconds beyond SILENT_AFTER by which its report is older than that of another replica
    sent: dict[str, SentRequest] = field(default_factory=dict)  # by request id: those that have not ended
    # Requests that have ended in the last GRACE seconds, with their times of ending
    ended: deque[tuple[float, SentRequest]] = field(default_factory=deque)

    def update(self, statistics: Mapping[str, Any], now: float) -> None:
        """Replace the replica's statistics by newer ones; statistics that are the same as before have no effect."""
        if not statistics or statistics == self.reported:
            return
        self.reported, self.reported_at = statistics, now
        self.is_ready = bool(statistics.get("ready", True))
        self.instances = {name: InstanceState.from_dict(each) for name, each in statistics["instances"].items()}
        self.queued_tokens = int(statistics["queued_tokens"])
        self.num_requests = int(statistics["num_requests"])

    def find_instance(self, hint: Hint) -> InstanceState | None:
        """Return the instance that will serve a request here; None if the replica has not reported it."""
        return self.instances.get(hint.instance or "")

    def count_cached_tokens(self, hint: Hint, now: float) -> int:
        """Return how many tokens of a prompt's beginning should be cached here.

        The last token is never taken from a cache, as its logits are needed.
        """
        state = self.find_instance(hint)
        if state is None or not state.shares or not hint.names:
            return 0
        resident = sum(1 for _ in takewhile(state.names.__contains__, hint.names))
        recent = max((_count_common(hint, each.hint) for each in self._list_recent(now)), default=0)
        usable = max(0, hint.num_tokens - 1) // hint.block_size
        return min(max(resident, recent), usable) * hint.block_size

    def count_blocks(self, now: float) -> int:
        """Return the number of cached blocks, with those of prompts that were sent since the replica reported."""
        reported = sum(len(each.names) for each in self.instances.values())
        return reported + sum(
            each.uncached_tokens // each.hint.block_size for each in self._list_recent(now) if self._is_new(each.hint)
        )

    def _is_new(self, hint: Hint) -> bool:
        """Return whether the replica has not reported the blocks of a prompt that was sent to it."""
        state = self.find_instance(hint)
        return bool(hint.names) and (state is None or hint.names[-1] not in state.names)

    def _list_recent(self, now: float) -> Iterable[SentRequest]:
        while self.ended and self.ended[0][0] < now - GRACE:
            self.ended.popleft()
        yield from self.sent.values()
        yield from (each for _, each in self.ended)

    def estimate_load(self) -> int:
        """Return the work that a new request waits for, in prompt tokens."""
        since = [each for each in self.sent.values() if each.sent_at > self.reported_at]
        queued = self.queued_tokens + sum(each.uncached_tokens for each in since)
        running = max(self.num_requests + len(since), len(self.sent))
        return queued + DECODE_TOKENS * running + int(SILENCE_TOKENS * self.silence)

    def has_room(self, hint: Hint, cached_tokens: int) -> bool:
        """Return whether a request's instance has memory for it here, as far as the replica has reported."""
        state = self.find_instance(hint)
        num_tokens = hint.num_tokens + hint.max_tokens - cached_tokens
        return state is None or num_tokens * state.bytes_per_token <= state.free_bytes


def _count_common(one: Hint, other: Hint) -> int:
    """Return the number of blocks at the beginning of both prompts."""
    if one.instance != other.instance:
        return 0
    return sum(1 for _ in takewhile(bool, map(eq, one.names, other.names)))


# ---------------------------------------------------------------- the policy
class Decision(NamedTuple):
    """The replicas for a request, the best first, and the reason for the first."""

    replicas: Sequence[str]
    reason: Reason
    cached_tokens: int = 0  # tokens of the prompt that the first of them should find in its cache

    def explain(self) -> dict[str, Any]:
        """Return the fields that a client sees of the decision."""
        first = self.replicas[0] if self.replicas else None
        return {"replica": first, "reason": self.reason, "expected_cached_tokens": self.cached_tokens}


class RoutingPolicy:
    """Chooses replicas for requests, and remembers what it has sent where. Belongs to one router in one process."""

    def __init__(self, *, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas: dict[str, ReplicaState] = {}
        self._random = random.Random(seed)
        self._clock = clock

    def update(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the statistics of all replicas, by their ids; forget replicas that are not among them."""
        self._replicas = {id: self._replicas.get(id) or ReplicaState(id) for id in statistics}
        now = self._clock()
        for id, each in statistics.items():
            self._replicas[id].update(each, now)
        newest = max((each.reported_at for each in self._replicas.values()), default=now)
        for replica in self._replicas.values():  # one that has just joined has not reported yet
            late = newest - replica.reported_at - SILENT_AFTER if replica.reported is not None else 0.0
            replica.silence = max(0.0, late)

    def forget(self, replica: str) -> None:
        """Forget a replica that has died."""
        self._replicas.pop(replica, None)

    def choose(self, hint: Hint | None, candidates: Sequence[str]) -> Decision:
        """Return the order in which candidates, the ids of replicas that Ray can call, should get a request."""
        replicas = [self._replicas.setdefault(id, ReplicaState(id)) for id in candidates]
        if hint is not None and hint.replica is not None:
            return Decision([each.id for each in replicas if each.id == hint.replica], "asked for")
        replicas = _filter_able(hint, replicas)
        if len(replicas) == 1:
            return Decision([replicas[0].id], "only one", self._count_cached(hint, replicas[0]))
        if hint is None or not any(each.instances or each.sent for each in replicas):
            return self._choose_by_two_choices(replicas)
        if hint.conversation and not self._can_share(hint, replicas):
            return self._choose_for_conversation(hint, replicas)
        return self._choose_cheapest(hint, replicas)

    def _count_cached(self, hint: Hint | None, replica: ReplicaState) -> int:
        return 0 if hint is None else replica.count_cached_tokens(hint, self._clock())

    def _can_share(self, hint: Hint, replicas: Sequence[ReplicaState]) -> bool:
        return any(state.shares for each in replicas if (state := each.find_instance(hint)))

    def _choose_by_two_choices(self, replicas: Sequence[ReplicaState]) -> Decision:
        """Return the less loaded of two random replicas first (power of two choices), as nothing is known of caches."""
        drawn = self._random.sample(replicas, len(replicas))
        two = sorted(drawn[:2], key=ReplicaState.estimate_load)
        return Decision([each.id for each in (*two, *drawn[2:])], "two choices")

    def _choose_for_conversation(self, hint: Hint, replicas: Sequence[ReplicaState]) -> Decision:
        """Return the replica that the conversation's key chooses first, unless it has twice the work of another."""
        ordered = sorted(replicas, key=ReplicaState.estimate_load)
        own = max(replicas, key=lambda each: _rank(hint.conversation, each.id))
        if own.estimate_load() > 2 * ordered[0].estimate_load() + DECODE_TOKENS:
            return Decision([each.id for each in ordered], "least loaded")
        return Decision([own.id, *(each.id for each in ordered if each is not own)], "conversation")

    def _choose_cheapest(self, hint: Hint, replicas: Sequence[ReplicaState]) -> Decision:
        """Return the replicas in the order of the request's cost there; those without memory for it come last."""
        now = self._clock()
        cached = {each.id: each.count_cached_tokens(hint, now) for each in replicas}
        loads = {each.id: each.estimate_load() for each in replicas}
        costs = {id: UNCACHED_WEIGHT * (hint.num_tokens - cached[id]) + load for id, load in loads.items()}
        limit = min(costs.values()) + EQUAL_TOKENS
        # Among equally good replicas those with more of the prompt come first, then those with less work, then those
        # with fewer blocks in their caches; else the prompt's first block chooses, so that several routers choose alike
        first_name = str(hint.names[0]) if hint.names else str(self._random.random())
        keys = {
            each.id: (
                not each.has_room(hint, cached[each.id]),
                max(costs[each.id], limit),
                -cached[each.id],
                loads[each.id],
                each.count_blocks(now),
                -_rank(first_name, each.id),
            )
            for each in replicas
        }
        ordered = sorted(keys, key=keys.__getitem__)
        best = cached[ordered[0]]
        return Decision(ordered, "cached" if best else "least loaded", best)

    # ------------------------------------------------------------ what was sent
    def record_sent(self, request_id: str, hint: Hint, replica: str) -> None:
        """Remember that a request was sent to a replica, whose cache will have its prompt.

        Calls without a prompt, such as for statistics, are no load.
        """
        known = self._replicas.get(replica)
        if known is None or not hint.num_tokens:
            return
        now = self._clock()
        uncached = hint.num_tokens - known.count_cached_tokens(hint, now)
        known.sent[request_id] = SentRequest(hint, uncached, now)

    def record_ended(self, request_id: str, replica: str) -> None:
        """Remember that a request has ended."""
        known = self._replicas.get(replica)
        if known is not None and (sent := known.sent.pop(request_id, None)) is not None:
            known.ended.append((self._clock(), sent))


def _filter_able(hint: Hint | None, replicas: list[ReplicaState]) -> list[ReplicaState]:
    """Return the replicas that can serve a request: ready ones that have not failed it, and have its instance.

    A condition that no replica meets is ignored, as any replica can then answer with the error.
    """
    replicas = [each for each in replicas if each.is_ready] or replicas
    if hint is None:
        return replicas
    replicas = [each for each in replicas if each.id not in hint.avoid] or replicas
    if hint.instance is None:
        return replicas
    return [each for each in replicas if not each.instances or hint.instance in each.instances] or replicas


def _rank(key: str, replica: str) -> int:
    """Return the rank of a replica for a key, by rendezvous hashing: it does not change when others join or leave."""
    return int.from_bytes(hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest(), "big")
