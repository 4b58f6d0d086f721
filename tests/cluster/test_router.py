"""The routing policy sends requests to where their prompts are cached, unless that replica has too much to do."""

from __future__ import annotations

import random
from array import array
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.cluster.router import GRACE, SILENT_AFTER, Hint, RoutingPolicy
from tests.cluster.simulation import BLOCK, Clock, RoundRobin, SimulatedReplica, make_chats, simulate

IDS = ["a", "b", "c", "d"]
IDLE: dict[str, Any] = {"queued_tokens": 0, "num_requests": 0}


def make_instance(names: tuple[int, ...] = (), *, shares: bool = True, free: int = 1 << 30) -> dict[str, Any]:
    return {"shares": shares, "names": array("I", names).tobytes(), "free_bytes": free, "bytes_per_token": 1.0}


def make_policy(clock: Clock | None = None, **instances: dict[str, Any]) -> RoutingPolicy:
    """Return a policy that knows idle replicas, each with an instance "paged", whose caches are empty by default."""
    policy = RoutingPolicy(seed=0, clock=clock or Clock())
    policy.update({id: {"instances": {"paged": instances.get(id, make_instance())}, **IDLE} for id in IDS})
    return policy


def make_hint(*names: int, more_tokens: int = 1, **fields: Any) -> Hint:
    return Hint(
        **{"instance": "paged", "names": names, "block_size": BLOCK, "num_tokens": len(names) * BLOCK + more_tokens}
        | fields
    )


# ---------------------------------------------------------------- what is cached
def test_a_prompt_goes_to_where_it_is_cached() -> None:
    policy = make_policy(b=make_instance((1, 2, 3)), c=make_instance((1, 2, 3, 4, 5, 6, 7)))
    decision = policy.choose(make_hint(*range(1, 9)), IDS)
    assert (decision.replicas[0], decision.reason, decision.cached_tokens) == ("c", "cached", 7 * BLOCK)
    assert sorted(decision.replicas) == IDS, "the others are tried if it refuses"
    assert decision.explain() == {"replica": "c", "reason": "cached", "expected_cached_tokens": 7 * BLOCK}


def test_only_cached_blocks_from_the_beginning_on_count() -> None:
    policy = make_policy(b=make_instance((2, 3, 4, 5)), c=make_instance((1,)))
    assert policy.choose(make_hint(1, 2, 3, 4, 5), IDS).cached_tokens == BLOCK


@pytest.mark.parametrize(("more_tokens", "expected"), [(0, 1), (1, 2)])
def test_the_last_token_is_never_cached(more_tokens: int, expected: int) -> None:
    policy = make_policy(b=make_instance((1, 2)))
    assert policy.choose(make_hint(1, 2, more_tokens=more_tokens), IDS).cached_tokens == expected * BLOCK


def test_a_prompt_that_was_just_sent_counts_as_cached_before_statistics_say_so() -> None:
    clock = Clock()
    policy = make_policy(clock)
    first = policy.choose(make_hint(*range(20)), IDS)
    policy.record_sent("one", make_hint(*range(20)), first.replicas[0])
    again = policy.choose(make_hint(*range(30)), IDS)
    assert (again.replicas[0], again.cached_tokens) == (first.replicas[0], 20 * BLOCK)
    policy.record_ended("one", first.replicas[0])
    clock.now += GRACE - 0.1
    assert policy.choose(make_hint(*range(30)), IDS).cached_tokens == 20 * BLOCK
    clock.now += 0.2
    assert policy.choose(make_hint(*range(30)), IDS).cached_tokens == 0, "statistics would name it by now"


def test_a_prompt_that_was_sent_is_not_cached_in_another_instance() -> None:
    policy = make_policy()
    policy.record_sent("one", make_hint(1, 2, 3), "b")
    assert policy.choose(make_hint(1, 2, 3, instance="other"), IDS).cached_tokens == 0


# ---------------------------------------------------------------- load and memory
def test_a_long_queue_weighs_more_than_a_short_prefix() -> None:
    policy = make_policy(b=make_instance((1, 2)))
    busy = {"instances": {"paged": make_instance((1, 2))}, "queued_tokens": 5000, "num_requests": 9}
    policy.update({id: busy if id == "b" else {"instances": {"paged": make_instance()}, **IDLE} for id in IDS})
    decision = policy.choose(make_hint(*range(1, 9)), IDS)
    assert decision.replicas[0] != "b"
    assert decision.reason == "least loaded"


def test_requests_that_come_at_once_are_spread() -> None:
    policy = make_policy()
    counts = dict.fromkeys(IDS, 0)
    for i in range(40):
        hint = make_hint(*range(1000 * i, 1000 * i + 30))
        chosen = policy.choose(hint, IDS).replicas[0]
        policy.record_sent(str(i), hint, chosen)
        counts[chosen] += 1
    assert max(counts.values()) <= 12, counts


def test_a_long_chat_stays_on_its_replica_though_that_gets_all_requests() -> None:
    clock = Clock()
    policy = make_policy(clock)
    chosen = []
    for i in range(40):
        hint = make_hint(*range(30 + i))
        chosen.append(policy.choose(hint, IDS).replicas[0])
        policy.record_sent(str(i), hint, chosen[-1])
        clock.now += 0.3
        policy.record_ended(str(i), chosen[-1])
    assert len({*chosen}) == 1, chosen


def test_calls_without_a_prompt_are_no_load() -> None:
    policy = make_policy()
    first = policy.choose(make_hint(*range(30)), IDS).replicas[0]
    for i in range(50):
        policy.record_sent(str(i), Hint(replica=first), first)
    assert policy.choose(make_hint(*range(30)), IDS).replicas[0] == first
    for i in range(50):
        policy.record_ended(str(i), first)


def test_an_instance_without_memory_left_is_avoided() -> None:
    full = make_instance(free=100)
    policy = make_policy(a=full, b=full, d=full)
    assert policy.choose(make_hint(*range(40), max_tokens=64), IDS).replicas[0] == "c"


def test_replicas_without_the_instance_get_no_requests() -> None:
    policy = make_policy()
    with_window = {"instances": {"window": make_instance(shares=False)}, **IDLE}
    policy.update({id: with_window if id in "bd" else {"instances": {"paged": make_instance()}, **IDLE} for id in IDS})
    assert sorted(policy.choose(make_hint(instance="window", num_tokens=9), IDS).replicas) == ["b", "d"]
    assert sorted(policy.choose(make_hint(instance="unknown", num_tokens=9), IDS).replicas) == IDS


# ---------------------------------------------------------------- without shared blocks, and without knowledge
def test_conversations_without_shared_blocks_stay_on_a_replica_until_it_is_loaded() -> None:
    ring = make_instance(shares=False)
    policy = make_policy(a=ring, b=ring, c=ring, d=ring)
    hint = make_hint(num_tokens=300, conversation="mine")
    own = policy.choose(hint, IDS)
    assert own.reason == "conversation"
    assert all(policy.choose(hint, random.sample(IDS, 4)).replicas[0] == own.replicas[0] for _ in range(9))
    for i in range(5):
        policy.record_sent(str(i), make_hint(num_tokens=2000), own.replicas[0])
    assert policy.choose(hint, IDS).reason == "least loaded"


def test_the_less_loaded_of_two_random_replicas_is_chosen_while_caches_are_unknown() -> None:
    policy = RoutingPolicy(seed=0)
    chosen = {policy.choose(None, IDS).replicas[0] for _ in range(200)}
    assert chosen == {*IDS}
    policy.update({id: {"instances": {}, "queued_tokens": 0, "num_requests": 50 * (id == "b")} for id in IDS})
    assert all(policy.choose(None, IDS).replicas[0] != "b" for _ in range(50))
    assert policy.choose(make_hint(1), ["d"]) == (["d"], "only one", 0)
    assert policy.choose(make_hint(1), []).replicas == []


def test_a_request_for_one_replica_goes_there_or_nowhere() -> None:
    policy = make_policy(b=make_instance((1, 2, 3)))
    assert policy.choose(make_hint(1, 2, 3, replica="d"), IDS).replicas == ["d"]
    assert policy.choose(make_hint(1, 2, 3, replica="gone"), IDS).replicas == []


def test_a_replica_that_does_not_report_gets_less_and_less() -> None:
    clock, prompt = Clock(), make_hint(*range(30))
    policy = RoutingPolicy(seed=0, clock=clock)
    instances = {id: {"paged": make_instance(tuple(range(30)) if id == "a" else ())} for id in IDS}
    statistics: dict[str, dict[str, Any]] = {}

    def report(*ids: str) -> None:
        statistics.update({id: {"instances": instances[id], **IDLE, "report": clock.now} for id in ids})
        policy.update(statistics)

    report(*IDS)
    clock.now += 60.0
    assert policy.choose(prompt, IDS).replicas[0] == "a", "no other replica has reported since"
    clock.now -= 60.0 - SILENT_AFTER - 1.0
    report("b", "c", "d")
    assert policy.choose(prompt, IDS).replicas[0] == "a", "it may have a long prompt to compute"
    clock.now += 60.0
    report("b", "c", "d")
    assert policy.choose(prompt, IDS).replicas[-1] == "a"
    report("a")
    assert policy.choose(prompt, IDS).replicas[0] == "a"


def test_several_routers_agree_on_new_prompts() -> None:
    for i in range(20):
        hint = make_hint(*range(100 * i, 100 * i + 9))
        assert len({make_policy().choose(hint, random.sample(IDS, 4)).replicas[0] for _ in range(5)}) == 1


def test_a_replica_that_died_is_forgotten() -> None:
    policy = make_policy(b=make_instance((1, 2, 3)))
    policy.record_sent("one", make_hint(1, 2, 3), "b")
    policy.forget("b")
    assert policy.choose(make_hint(1, 2, 3), IDS).cached_tokens == 0
    policy.record_ended("one", "b")


@pytest.mark.parametrize("argument", [None, 7, "text", [1]])
def test_other_arguments_than_hints_are_ignored(argument: Any) -> None:
    assert Hint.from_dict(argument) is None
    assert Hint.from_dict({"instance": "paged", "unknown": 1}) == Hint("paged")


# ---------------------------------------------------------------- whole loads
@pytest.mark.parametrize(
    ("num_blocks", "by_big", "by_round_robin", "right"),
    [pytest.param(400, 1.35, 0.75, 0.75, id="too few for all chats"), pytest.param(1200, 1.15, 0.5, 0.99, id="enough")],
)
def test_chats_compute_hardly_more_tokens_than_with_one_big_cache(
    num_blocks: int, by_big: float, by_round_robin: float, right: float, rng: random.Random
) -> None:
    """Loads differ much by chance (the imbalance of one is 1.0 to 1.9), so bounds are on the means of several."""
    outcomes = []
    for _ in range(8):
        requests = make_chats(rng, tenants=8, chats=60, turns=8, pause=3.0)
        big = simulate(requests, [SimulatedReplica(4 * num_blocks)])
        found = simulate(requests, [SimulatedReplica(num_blocks) for _ in IDS])
        round_robin = simulate(requests, [SimulatedReplica(num_blocks) for _ in IDS], RoundRobin())
        outcomes.append((found, big, round_robin))
        assert median(found.first_tokens) < 0.8 * median(round_robin.first_tokens)
    assert fmean(found.num_computed / big.num_computed for found, big, _ in outcomes) <= by_big
    assert fmean(found.num_computed / other.num_computed for found, _, other in outcomes) <= by_round_robin
    assert fmean(found.right_expectations for found, _, _ in outcomes) >= right
    assert fmean(found.imbalance for found, _, _ in outcomes) <= 1.7  # 1.2 and 1.3 on the average


@settings(max_examples=3)
@given(st.integers(0, 2**32))
def test_idle_replicas_are_equally_loaded_without_computing_prompts_twice(seed: int) -> None:
    """Answers are so short that hardly a replica is busy when a request comes."""
    draw, computed, imbalance = random.Random(seed), list[float](), list[float]()
    for _ in range(8):
        requests = make_chats(
            draw, tenants=8, chats=32, turns=6, pause=1.5, start_seconds=8.0, answer_seconds=(0.03, 0.07)
        )
        big = simulate(requests, [SimulatedReplica(9000)])
        found = simulate(requests, [SimulatedReplica(9000) for _ in IDS])
        computed.append(found.num_computed / big.num_computed)
        imbalance.append(found.imbalance)
    assert fmean(computed) <= 1.1
    assert fmean(imbalance) <= 1.7  # 1.37 on the average
