"""Properties of every eviction policy: no entry is lost or evicted twice, hits count, priority and ttl come first."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache_strategies.eviction import list_policies, load_policy
from cache_strategies.eviction.base import EvictionPolicy
from cache_strategies.eviction.lru import LRU
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.eviction.s3fifo import S3FIFO
from config.errors import SettingsError

POLICIES = sorted(list_policies())
KEYS = st.integers(0, 12)


class Clock:
    """A clock that a test sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- any history
class Histories(RuleBasedStateMachine):
    """Random insertions, hits and evictions; a dictionary of retentions tells which entries may be evicted next."""

    policy: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.retained = EvictionQueue(self.policy, self.clock)
        self.idle: set[int] = set()
        self.worth: dict[int, tuple[int, float]] = {}

    @rule(key=KEYS, priority=st.sampled_from([0, 0, 1, 5]), ttl=st.sampled_from([0.0, 1.0, 3.0, math.inf]))
    def leave(self, key: int, priority: int, ttl: float) -> None:
        """Release an entry in use by one user, who may not be the last."""
        if key in self.idle:
            return
        before = self.worth.get(key, (priority, 0.0))
        self.worth[key] = max(before[0], priority), max(before[1], self.clock.now + ttl)
        self.retained.update_retention(key, priority, ttl)

    @precondition(lambda self: self.worth.keys() - self.idle)
    @rule(which=st.integers(0, 99))
    def last_leaves(self, which: int) -> None:
        busy = sorted(self.worth.keys() - self.idle)
        key = busy[which % len(busy)]
        self.retained.insert(key, 10 + key)
        self.idle.add(key)

    @precondition(lambda self: self.idle)
    @rule(which=st.integers(0, 99))
    def wanted(self, which: int) -> None:
        key = sorted(self.idle)[which % len(self.idle)]
        self.retained.touch(key)
        self.idle.remove(key)

    @precondition(lambda self: self.idle)
    @rule()
    def evict(self) -> None:
        key = self.retained.evict()
        assert isinstance(key, int)
        assert key in self.idle
        over = {k for k in self.idle if self.worth[k][1] <= self.clock.now}
        assert key in over or (not over and self.worth[key][0] == min(self.worth[k][0] for k in self.idle))
        self.idle.remove(key)
        del self.worth[key]

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        self.retained.discard(key)
        self.idle.discard(key)
        self.worth.pop(key, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_same_are_idle(self) -> None:
        assert len(self.retained) == len(self.idle)
        assert all((key in self.retained) == (key in self.idle) for key in range(13))
        self.retained.check_integrity()


@pytest.mark.fuzz
@pytest.mark.parametrize("name", POLICIES)
def test_any_history(name: str) -> None:
    machine = type("History", (Histories,), {"policy": load_policy(name)})
    budget = settings(max_examples=60, stateful_step_count=60)
    run_state_machine_as_test(machine, settings=budget)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_wanted_again_and_again_outlives_what_is_not(name: str) -> None:
    retained = EvictionQueue(load_policy(name), Clock())
    for key in ("hot", *range(50)):
        retained.update_retention(key)
        retained.insert(key, 1)
    for n in range(200):
        retained.touch("hot")
        retained.insert("hot", 1)
        retained.update_retention(100 + n)
        retained.insert(100 + n, 1)
        assert retained.evict() != "hot"


@pytest.mark.parametrize("name", POLICIES)
def test_notes_of_when_entries_expire_do_not_pile_up(name: str) -> None:
    clock = Clock()
    retained = EvictionQueue(load_policy(name), clock)
    for n in range(10_000):
        clock.now += 1
        retained.update_retention(n, ttl=1e6)
        retained.insert(n, 1)
        if len(retained) > 10:
            retained.evict()
        retained.touch(n)
        retained.insert(n, 1)
    assert len(retained._expiry._heap) < 200


# ---------------------------------------------------------------- each in its own way
def test_lru_lets_go_in_the_order_of_use() -> None:
    retained = EvictionQueue(LRU, Clock())
    for key in "abcd":
        retained.update_retention(key)
        retained.insert(key, 1)
    retained.touch("a")
    retained.insert("a", 1)
    assert [retained.evict() for _ in range(4)] == ["b", "c", "d", "a"]


def test_s3fifo_lets_a_flood_pass_beside_what_was_wanted_twice() -> None:
    policy = S3FIFO()
    for key in range(10):
        policy.insert(key, 1, 0.0)
    for key in range(10):
        policy.touch(key, 0.0)
        policy.insert(key, 1, 0.0)
    for flood in range(100, 1100):
        policy.insert(flood, 1, 0.0)
        if len(policy) > 20:
            assert policy.evict() == flood - 10
    assert all(key in policy._main for key in range(10))


def test_s3fifo_gives_a_second_chance_to_what_returns_soon() -> None:
    policy = S3FIFO()
    for key in "abcdefgh":
        policy.insert(key, 1, 0.0)
    assert policy.evict() == "a"
    policy.insert("a", 1, 0.0)
    assert [policy.evict() for _ in range(8)] == [*"bcdefgh", "a"]


def test_s3fifo_lets_go_of_what_was_wanted_twice_in_the_order_of_use() -> None:
    policy = S3FIFO()
    for key in "abc":
        policy.insert(key, 1, 0.0)
    for key in "abcaaba":
        policy.touch(key, 0.0)
        policy.insert(key, 1, 0.0)
    assert [policy.evict() for _ in range(3)] == ["c", "b", "a"]


def test_lru_would_have_let_the_flood_take_all() -> None:
    """Contrast to s3fifo: lru evicts all older entries before those of the flood."""
    policy = LRU()
    for key in (*range(10), *range(100, 110)):
        policy.insert(key, 1, 0.0)
    assert [policy.evict() for _ in range(10)] == [*range(10)]


# ---------------------------------------------------------------- by name
def test_an_unknown_policy_is_told() -> None:
    with pytest.raises(SettingsError, match="there is no eviction policy 'fifo'; policies are lru, s3fifo"):
        load_policy("fifo")


def test_what_comes_back_with_less_time_goes_when_that_is_over() -> None:
    clock = Clock()
    retained = EvictionQueue(load_policy("lru"), clock)
    for ttl in (1000.0, 1.0):
        retained.discard("brief")
        retained.update_retention("brief", 50, ttl)
        retained.insert("brief", 1)
    retained.update_retention("low", 0)
    retained.insert("low", 1)
    clock.now += 10
    assert retained.evict() == "brief"
