"""Chooses the replica that serves a request, by what each has cached of its prompt, its queue and its free KV memory.

The policy knows replicas by their ids and statistics only; `KVRequestRouter` at the end applies it in Ray Serve. Ray
sends the module of a router by value to the processes that route, so this file imports nothing of the project, and what
it exchanges with other processes are dicts.

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

# Found by simulation (tests/cluster/simulation.py): more of the first leaves replicas less equally loaded, more of the
# second computes more prompts anew.
UNCACHED_WEIGHT = 2.0  # of a token that has to be computed: it takes time, and the place of another one in the cache
DECODE_TOKENS = 128  # tokens whose computation delays others as much as one running request does while it generates
# Tokens whose computation is as bad as taking all memory that an instance has left
PRESSURE_TOKENS = 512
# Replicas whose costs differ by fewer tokens are equally good: the name of the prompt chooses between them
EQUAL_TOKENS = 64
EQUAL_BLOCKS = 4  # caches that differ by fewer blocks are equally full
# Seconds by which a replica's report may be older than the newest one of another; each second more is as bad as so many
# tokens of computation. A replica that computes a long prompt reports late; one that hangs does not report at all
SILENT_AFTER = 3.0
SILENCE_TOKENS = 256
# Seconds after its end in which a request's prompt is believed to be cached though no statistics say so yet
GRACE = 3.0

Reason = Literal["asked for", "only one", "cached", "conversation", "least loaded", "two choices"]


# ---------------------------------------------------------------- requests and replicas
@dataclass(frozen=True, slots=True)
class Hint:
    """What a router is told about a request. The fields are those of the dict that is a request's first argument."""

    instance: str | None = None  # strategy instance that will serve it; None: each replica's own rules choose
    # Names of the prompt's full blocks, 32 bits each; they cover all tokens before, and the salt. The list may grow
    # while the answer is generated: then what was sent includes the answer
    names: Sequence[int] = ()
    block_size: int = 0  # number of tokens in a block
    num_tokens: int = 0  # of the prompt
    max_tokens: int = 0  # of the answer
    conversation: str = ""  # equal for all requests of a conversation; empty: none
    replica: str | None = None  # id of the replica that has to serve it; None: any
    avoid: Sequence[str] = ()  # ids of replicas that have failed the request, which is tried again

    @classmethod
    def from_dict(cls, found: Any) -> Hint | None:
        """Return the hint of a request's first argument; None if that is none."""
        if not isinstance(found, Mapping):
            return None
        known = {name: found[name] for name in cls.__slots__ if name in found}
        return cls(**known)


class InstanceState(NamedTuple):
    """An instance of a replica, from its statistics."""

    shares: bool = False  # whether requests may reuse tokens that others have left in its cache
    names: frozenset[int] = frozenset()  # of resident blocks
    free_bytes: int = 0  # KV memory that it may still take, what is idle included
    bytes_per_token: float = 0.0

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> InstanceState:
        """Return the state that a replica reports; `names` is a bytes of 32-bit numbers."""
        names = array("I", found.get("names", b""))
        return cls(bool(found["shares"]), frozenset(names), int(found["free_bytes"]), float(found["bytes_per_token"]))


class Sent(NamedTuple):
    """A request that was sent to a replica and may not be in its statistics yet."""

    hint: Hint
    uncached_tokens: int
    sent_at: float


@dataclass(slots=True)
class Replica:
    """What is known about a replica."""

    id: str
    instances: dict[str, InstanceState] = field(default_factory=dict)
    queued_tokens: int = 0  # prompt tokens of its requests that were not computed when it reported
    num_requests: int = 0  # that it had when it reported
    is_ready: bool = True  # False: it has reported that its engine is starting, or starting again
    reported: object = None  # the latest statistics, to see whether others have come
    reported_at: float = float("-inf")
    silence: float = 0.0  # seconds beyond SILENT_AFTER by which its report is older than that of another replica
    sent: dict[str, Sent] = field(default_factory=dict)  # by request id: those that have not ended
    ended: deque[tuple[float, Sent]] = field(default_factory=deque)  # those of the last GRACE seconds, with their ends

    def update(self, statistics: Mapping[str, Any], now: float) -> None:
        """Take new statistics of the replica; those known already change nothing."""
        if not statistics or statistics == self.reported:
            return
        self.reported, self.reported_at = statistics, now
        self.is_ready = bool(statistics.get("ready", True))
        self.instances = {name: InstanceState.from_dict(each) for name, each in statistics["instances"].items()}
        self.queued_tokens = int(statistics["queued_tokens"])
        self.num_requests = int(statistics["num_requests"])

    def count_cached_tokens(self, hint: Hint, now: float) -> int:
        """Return how many of a prompt's tokens are believed to be cached, all from its beginning on.

        The last token is never taken from a cache, as its logits are needed.
        """
        state = self.instances.get(hint.instance or "")
        if state is None or not state.shares or not hint.names:
            return 0
        resident = sum(1 for _ in takewhile(state.names.__contains__, hint.names))
        recent = max((_count_common(hint, each.hint) for each in self._list_recent(now)), default=0)
        usable = max(0, hint.num_tokens - 1) // hint.block_size
        return min(max(resident, recent), usable) * hint.block_size

    def count_names(self) -> int:
        """Return how many blocks are cached in all instances, as the replica has reported."""
        return sum(len(each.names) for each in self.instances.values())

    def _list_recent(self, now: float) -> Iterable[Sent]:
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

    def estimate_pressure(self, hint: Hint, cached_tokens: int) -> float:
        """Return what the memory that a request needs costs the instance's others, in prompt tokens."""
        state = self.instances.get(hint.instance or "")
        if state is None or not state.bytes_per_token:
            return 0.0
        needed = state.bytes_per_token * (hint.num_tokens + hint.max_tokens - cached_tokens)
        return PRESSURE_TOKENS * min(4.0, needed / max(1, state.free_bytes))


def _count_common(one: Hint, other: Hint) -> int:
    """Return how many blocks two prompts have in common, from their beginnings on."""
    if one.instance != other.instance:
        return 0
    return sum(1 for _ in takewhile(bool, map(eq, one.names, other.names)))


# ---------------------------------------------------------------- the policy
class Decision(NamedTuple):
    """The replicas for a request, the best first, and why."""

    replicas: Sequence[str]
    reason: Reason
    cached_tokens: int = 0  # that the first of them is expected to find

    def explain(self) -> dict[str, Any]:
        """Return what a client sees of it."""
        first = self.replicas[0] if self.replicas else None
        return {"replica": first, "reason": self.reason, "expected_cached_tokens": self.cached_tokens}


class RoutingPolicy:
    """Chooses replicas for requests, and remembers what it has sent where. Belongs to one router in one process."""

    def __init__(self, *, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas: dict[str, Replica] = {}
        self._random = random.Random(seed)
        self._clock = clock

    def update(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the statistics of all replicas that there are, by their ids; other replicas are forgotten."""
        self._replicas = {id: self._replicas.get(id) or Replica(id) for id in statistics}
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
        """Return the order in which the candidates, ids of replicas that can be asked, should get a request."""
        replicas = [self._replicas.setdefault(id, Replica(id)) for id in candidates]
        if hint is not None and hint.replica is not None:
            return Decision([each.id for each in replicas if each.id == hint.replica], "asked for")
        replicas = [each for each in replicas if each.is_ready] or replicas
        if hint is not None and hint.avoid:
            replicas = [each for each in replicas if each.id not in hint.avoid] or replicas
        if hint is not None and hint.instance is not None:
            able = [each for each in replicas if not each.instances or hint.instance in each.instances]
            replicas = able or replicas  # if none has the instance, any of them can say so
        if len(replicas) == 1:
            return Decision([replicas[0].id], "only one", self._count_cached(hint, replicas[0]))
        if hint is None or not any(each.instances or each.sent for each in replicas):
            return self._choose_of_two(replicas)
        if hint.conversation and not self._is_shared(hint, replicas):
            return self._choose_for_conversation(hint, replicas)
        return self._choose_cheapest(hint, replicas)

    def _count_cached(self, hint: Hint | None, replica: Replica) -> int:
        return 0 if hint is None else replica.count_cached_tokens(hint, self._clock())

    def _is_shared(self, hint: Hint, replicas: Sequence[Replica]) -> bool:
        return any(state.shares for each in replicas if (state := each.instances.get(hint.instance or "")))

    def _choose_of_two(self, replicas: Sequence[Replica]) -> Decision:
        """Return the less loaded of two random replicas first: all that can be done without knowing any."""
        drawn = self._random.sample(replicas, len(replicas))
        two = sorted(drawn[:2], key=Replica.estimate_load)
        return Decision([each.id for each in (*two, *drawn[2:])], "two choices")

    def _choose_for_conversation(self, hint: Hint, replicas: Sequence[Replica]) -> Decision:
        """Return the conversation's own replica first, unless it has twice the work of the least loaded one."""
        ordered = sorted(replicas, key=Replica.estimate_load)
        own = max(replicas, key=lambda each: _rank(hint.conversation, each.id))
        if own.estimate_load() > 2 * ordered[0].estimate_load() + DECODE_TOKENS:
            return Decision([each.id for each in ordered], "least loaded")
        return Decision([own.id, *(each.id for each in ordered if each is not own)], "conversation")

    def _choose_cheapest(self, hint: Hint, replicas: Sequence[Replica]) -> Decision:
        """Return the replicas by what the request costs there: tokens to compute, work before it, memory."""
        now = self._clock()
        cached = {each.id: each.count_cached_tokens(hint, now) for each in replicas}
        costs = {
            each.id: UNCACHED_WEIGHT * (hint.num_tokens - cached[each.id])
            + each.estimate_load()
            + each.estimate_pressure(hint, cached[each.id])
            for each in replicas
        }
        limit = min(costs.values()) + EQUAL_TOKENS
        # Of equally good replicas, those with less in their caches come first, and of these the prompt's first block
        # chooses, so that several routers agree on new prompts
        filled = {each.id: each.count_names() // EQUAL_BLOCKS for each in replicas}
        first_name = str(hint.names[0]) if hint.names else str(self._random.random())
        ordered = sorted(costs, key=lambda id: (max(costs[id], limit), -cached[id], filled[id], -_rank(first_name, id)))
        best = cached[ordered[0]]
        return Decision(ordered, "cached" if best else "least loaded", best)

    # ------------------------------------------------------------ what was sent
    def record_sent(self, request_id: str, hint: Hint, replica: str) -> None:
        """Remember that a request was sent to a replica, whose cache will have its prompt."""
        known = self._replicas.get(replica)
        if known is None:
            return
        now = self._clock()
        uncached = hint.num_tokens - known.count_cached_tokens(hint, now)
        known.sent[request_id] = Sent(hint, uncached, now)

    def record_ended(self, request_id: str, replica: str) -> None:
        """Remember that a request has ended."""
        known = self._replicas.get(replica)
        if known is not None and (sent := known.sent.pop(request_id, None)) is not None:
            known.ended.append((self._clock(), sent))


def _rank(key: str, replica: str) -> int:
    """Return the rank of a replica for a key: the highest stays the highest when others join or leave."""
    return int.from_bytes(hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest(), "big")


# ---------------------------------------------------------------- Ray Serve
try:
    from ray.serve.exceptions import DeploymentUnavailableError
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError:  # the extra kvmux[ray] is not installed: only the policy can be used
    pass
else:

    class KVRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
        """Routes the requests of a deployment handle by a `RoutingPolicy`.

        The first argument of a request is the dict of its `Hint`; it gets an item "routed", which explains the choice,
        and an item "replicas", the ids of those that there are, if the one that it is for is not among them.
        Ray asks for statistics of replicas by their method `record_routing_stats`.
        """

        def initialize_state(self, **_: Any) -> None:
            self._policy = RoutingPolicy()

        async def choose_replicas(
            self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
        ) -> list[list[RunningReplica]]:
            by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
            if not by_id:
                return []
            self._policy.update({id: each.routing_stats for id, each in self._by_id(self.curr_replicas).items()})
            argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
            decision = self._policy.choose(Hint.from_dict(argument), [*by_id])
            if isinstance(argument, dict):
                argument["routed"] = decision.explain()
            if pending_request is not None:
                # Else Ray would call this again at once, for ever, while the chosen replicas take nothing
                pending_request.routing_context.should_backoff = True
                if not decision.replicas:
                    self._refuse(pending_request, [*by_id])
                    return [[each] for each in by_id.values()]  # Ray notices with the first that there is nothing to do
            return [[by_id[id]] for id in decision.replicas]

        def _refuse(self, pending_request: PendingRequest, ids: list[str]) -> None:
            """Have a request fail, as the replica that it is for is not one of `ids`: Ray would wait for it."""
            pending_request.args[0]["replicas"] = ids
            if not pending_request.future.done():
                pending_request.future.set_exception(DeploymentUnavailableError(self._deployment_id))
                self._remove_pending_request_from_indices(pending_request)

        def _by_id(self, replicas: Mapping[ReplicaID, RunningReplica]) -> dict[str, RunningReplica]:
            return {id.unique_id: each for id, each in replicas.items()}

        def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
            hint = Hint.from_dict(pending_request.args[0]) if pending_request.args else None
            if hint is not None:
                request_id = pending_request.metadata.internal_request_id
                self._policy.record_sent(request_id, hint, replica_id.unique_id)

        def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
            self._policy.record_ended(internal_request_id, replica_id.unique_id)

        def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
            super().on_replica_actor_died(replica_id)
            self._policy.forget(replica_id.unique_id)
