"""Operators' commands on a running engine take effect, or are rejected and change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_strategies.base import CacheSetup
from cache_strategies.types import EVERYTHING, NO_SALT, Pin, Salt, SaltScope
from server.engine.admin import run_command
from server.engine.ipc.messages import Abort, Clear, DropPrefix, Inspect, PinCachedPrefix, PinPrefix, Share, Unpin
from server.engine.live.prefixes import describe_prefixes
from server.engine.scheduling.request import RequestError
from tests.cache_strategies.cache_driver import find_cached
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt
from tests.engine.isolation.faulty_strategies import FaultyPagedCache, FaultyPagedOptions

PROMPT = random_prompt(40)
SETTINGS: dict[str, Any] = {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "max_seq_len": 64}


def warm(tiny: Path, **settings: Any) -> Driver:
    """Return an engine with one cached prompt."""
    driver = Driver(tiny, **(SETTINGS | settings))
    driver.submit("first", PROMPT, 4, kv_cache="paged")
    driver.run()
    return driver


def cached(driver: Driver, salt: Salt = NO_SALT) -> int:
    return find_cached(driver.core.instances["paged"], PROMPT, salt=salt)


def test_it_shows_requests_blocks_and_shares(tiny: Path) -> None:
    driver = warm(tiny)
    driver.submit("it", PROMPT, 9, kv_cache="paged")
    driver.step(), driver.step()
    told = json.loads(json.dumps(run_command(driver.engine, Inspect("paged"))))
    assert told["requests"] == [
        {
            "id": "it",
            "state": "running",
            "prompt_tokens": 40,
            "generated_tokens": 2,
            "cached_tokens": 36,
            "preemptions": 0,
            "kept_tokens": 41,
            "dropped_tokens": 0,
        }
    ]
    assert told["blocks"] == {"in_use": 11, "shared": 0, "pending": 0, "pinned": 0, "idle": 0} | {
        "idle": told["blocks"]["idle"]
    }
    assert (told["floor_bytes"], told["limit_bytes"]) == (0, driver.core.memory.total_bytes)
    assert told["pins"] == []
    for name in ("contiguous", "sliding_window"):
        assert run_command(driver.engine, Inspect(name))["requests"] == []


def test_clear_forgets_by_salt_or_all(tiny: Path) -> None:
    driver = warm(tiny)
    assert cached(driver) == 36
    assert run_command(driver.engine, Clear("paged", "", "other")) == {"freed_bytes": 0}
    assert cached(driver) == 36
    freed = run_command(driver.engine, Clear("paged"))["freed_bytes"]
    assert freed == 10 * driver.block_bytes()
    assert cached(driver) == 0
    driver.assert_nothing_leaked()


def test_a_pin_stays_until_it_is_let_go(tiny: Path) -> None:
    driver = warm(tiny)
    pin = run_command(driver.engine, PinPrefix("paged", PROMPT, 100.0))
    assert (pin["tokens"], pin["ttl"]) == (40, pytest.approx(100, abs=1))
    driver.core.instances["paged"].evict(1 << 30)
    assert cached(driver) == 36
    assert run_command(driver.engine, Inspect("paged"))["pins"][0]["id"] == pin["id"]
    assert run_command(driver.engine, Unpin("paged", pin["id"])) == {"id": pin["id"], "deleted": True}
    driver.assert_nothing_leaked()


def test_a_prefix_is_pinned_and_dropped_by_its_id(tiny: Path) -> None:
    driver = warm(tiny)
    (node,) = describe_prefixes(driver.core)["instances"]["paged"]["prefixes"]
    pin = run_command(driver.engine, PinCachedPrefix("paged", node["id"], 100.0))
    assert (pin["tokens"], pin["ttl"]) == (40, pytest.approx(100, abs=1))
    driver.core.instances["paged"].evict(1 << 30)
    assert cached(driver) == 36
    freed = run_command(driver.engine, DropPrefix("paged", node["id"]))
    assert freed == {"id": node["id"], "freed_bytes": 10 * driver.block_bytes()}
    assert cached(driver) == 0
    assert run_command(driver.engine, Inspect("paged"))["pins"] == []
    driver.assert_nothing_leaked()


def test_a_dropped_prefix_makes_room_for_those_who_wait(tiny: Path) -> None:
    driver = warm(tiny)
    changes = driver.core.scheduler._room_changes
    (node,) = describe_prefixes(driver.core)["instances"]["paged"]["prefixes"]
    run_command(driver.engine, DropPrefix("paged", node["id"]))
    assert driver.core.scheduler._room_changes > changes


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        (Inspect("none"), 404, "there is no cache strategy 'none'; there are paged, contiguous, sliding_window"),
        (Unpin("paged", "pin-9"), 404, "there is no pin 'pin-9'"),
        (Unpin("contiguous", "pin-9"), 409, "strategy 'contiguous' does not support pins"),
        (Clear("sliding_window", None), 409, "strategy 'sliding_window' does not support clearing"),
        (PinPrefix("paged", [1, 2, 3, 4, 5], "/", 9.0), 409, "no block of this prefix is cached"),
        (PinCachedPrefix("paged", "abc", 9.0), 409, "there is no cached prefix 'abc'"),
        (PinCachedPrefix("contiguous", "abc", 9.0), 409, "strategy 'contiguous' does not support listing prefixes"),
        (DropPrefix("paged", "abc"), 404, "there is no cached prefix 'abc'"),
        (DropPrefix("sliding_window", "abc"), 409, "does not support listing prefixes"),
        (Share("paged", "60%", "40%"), 400, "bytes, more than the limit"),
        (Share("paged", None, "0%"), 409, "the longest sequence of strategy 'paged'"),
        (Share("paged", "100%", None), 409, "would not fit"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(tiny: Path, command: Any, status: int, told: str) -> None:
    driver = warm(tiny)
    before = run_command(driver.engine, Inspect("paged"))
    with pytest.raises(RequestError, match=told) as caught:
        run_command(driver.engine, command)
    assert caught.value.status == status
    assert run_command(driver.engine, Inspect("paged")) == before


def test_a_lower_limit_lets_running_requests_end_and_idle_memory_go(tiny: Path, reference: Reference) -> None:
    driver = Driver(tiny, **SETTINGS)
    prompts = [random_prompt(30, seed=n) for n in range(6)]
    for i, prompt in enumerate(prompts):
        driver.submit(str(i), prompt, 20, kv_cache="paged")
    for _ in range(4):
        driver.step()
    running = driver.running()
    assert len(running) == 6
    size = driver.core.instances["paged"].bytes_for(64)
    run_command(driver.engine, Share("paged", None, str(size)))
    driver.submit("late", prompts[0], 20, kv_cache="paged")
    driver.step()
    assert driver.running() == running
    assert driver.waiting() == ["late"]
    driver.run()
    assert sum(record.preemptions for record in driver.records) == 0
    for i, prompt in enumerate(prompts):
        assert driver.heard[str(i)].tokens == reference.greedy(prompt, 20)
    assert driver.heard["late"].tokens == reference.greedy(prompts[0], 20)
    assert driver.core.memory.get_held_bytes("paged") <= size
    driver.assert_nothing_leaked()


def test_a_higher_limit_counts_at_once(tiny: Path) -> None:
    driver = warm(tiny)
    told = run_command(driver.engine, Share("paged", "10%", "50%"))
    total = driver.core.memory.total_bytes
    assert driver.core.memory.get_share("paged") == (total // 10, total // 2)
    assert told["limit_bytes"] == total // 2
    run_command(driver.engine, Share("paged", None, "100%"))
    assert driver.core.memory.get_share("paged") == (total // 10, total)


def limited(driver: Driver, sequences: float) -> None:
    """Set the limit of the instance to the memory of `sequences` sequences of max_seq_len."""
    run_command(driver.engine, Share("paged", None, str(int(driver.core.instances["paged"].bytes_for(64) * sequences))))


def test_a_lowered_limit_and_an_urgent_request_stop_nobody(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    for i in range(6):
        driver.submit(str(i), random_prompt(30, seed=i), 20, kv_cache="paged")
    driver.submit("other", random_prompt(30, seed=99), 20, kv_cache="contiguous")
    for _ in range(4):
        driver.step()
    limited(driver, 1)
    driver.submit("urgent", random_prompt(10, seed=7), 5, kv_cache="paged", priority=-1)
    driver.submit("elsewhere", random_prompt(10, seed=8), 5, kv_cache="contiguous", priority=-1)
    driver.run()
    assert all(heard.finish_reason == "length" for heard in driver.heard.values())
    assert not any(record.preemptions for record in driver.records), "running requests end as they would have"
    driver.assert_nothing_leaked()


def test_choices_do_not_begin_while_a_limit_is_being_reached(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS | {"max_num_batched_tokens": 6})
    driver.submit("long", random_prompt(4, seed=2), 60, kv_cache="paged")
    for i in range(6):
        driver.submit(f"choice {i}", random_prompt(34), 28, kv_cache="paged", sibling_of="choice 0" if i else None)
    for _ in range(4):
        driver.step()
    limited(driver, 1)
    steps = 0
    while driver.core.instances["paged"].draining:
        assert set(driver.running()) <= {"long", "choice 0"}
        driver.step()
        steps += 1
    assert steps > 20, "choice 0 had its first token long before"
    driver.run()
    assert all(heard.finish_reason == "length" for heard in driver.heard.values())


def test_pins_are_no_reason_to_preempt_while_a_limit_is_being_reached(tiny: Path) -> None:
    driver = warm(tiny)
    run_command(driver.engine, PinPrefix("paged", PROMPT, 100.0))
    for i in range(4):
        driver.submit(str(i), random_prompt(30, seed=i), 20, kv_cache="paged")
    for _ in range(4):
        driver.step()
    limited(driver, 2)
    driver.run()
    assert not any(record.preemptions for record in driver.records)


def test_a_raised_limit_lets_those_who_wait_begin_at_once(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    limited(driver, 1)
    driver.submit("long", random_prompt(40), 24, kv_cache="paged")
    driver.submit("second", random_prompt(30, seed=3), 20, kv_cache="paged")
    for _ in range(3):
        driver.step()
    assert driver.waiting() == ["second"]
    run_command(driver.engine, Share("paged", None, "100%"))
    driver.step()
    assert driver.waiting() == []


def test_what_a_running_request_computes_after_a_clear_is_not_found(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("it", random_prompt(8), 30, kv_cache="paged")
    driver.step()
    run_command(driver.engine, Clear("paged"))
    for _ in range(22):
        driver.step()
    assert find_cached(driver.core.instances["paged"], driver.request("it").tokens[:24]) == 0


SALTS = (Salt("you"), Salt("you", "mine"), Salt("you", "other"), Salt("me"), Salt("me", "mine"))


@pytest.mark.parametrize(
    ("scope", "cleared"),
    [
        (SaltScope("you"), SALTS[:3]),
        (SaltScope("you", "mine"), SALTS[1:2]),
        (SaltScope("you", ""), SALTS[:1]),
        (EVERYTHING, SALTS),
    ],
)
def test_clear_takes_a_tenant_one_of_its_salts_or_everything(
    tiny: Path, scope: SaltScope, cleared: tuple[Salt, ...]
) -> None:
    driver = Driver(tiny, **SETTINGS)
    for salt in SALTS:
        driver.submit(str(salt), PROMPT, 1, kv_cache="paged", tenant=salt.tenant, cache_salt=salt.cache_salt)
    driver.run()
    run_command(driver.engine, Clear("paged", *scope))
    assert [salt for salt in SALTS if not cached(driver, salt)] == [*cleared]


def test_a_request_that_is_ended_frees_its_memory_and_hears_an_error(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    ended, other = (driver.submit(name, PROMPT, 9, kv_cache="paged") for name in ("ended", "other"))
    waiting = driver.submit("waiting", PROMPT, 9, kv_cache="contiguous")
    driver.step(), driver.step()
    for name in ("ended", "waiting"):
        assert run_command(driver.engine, Abort(0, name)) == {"id": name, "deleted": True}
        with pytest.raises(RequestError) as refused:
            run_command(driver.engine, Abort(0, name))
        assert (refused.value.status, refused.value.code) == (404, "not_found")
    driver.run()
    for events in (ended, waiting):
        assert events.failed is not None
        assert (events.failed.status, events.failed.code) == (410, "ended_by_operator")
    assert (other.finish_reason, len(other.tokens)) == ("length", 9)
    driver.assert_nothing_leaked()


WRONG = {
    "a pin that is none": (PinPrefix("paged", PROMPT, 60.0), "pin", None),
    "a pin of another type": (PinCachedPrefix("paged", "a", 60.0), "pin_prefix", {"id": "a"}),
    "a pin without end": (PinPrefix("paged", PROMPT, 60.0), "pin", Pin("a", 4, 64, NO_SALT, float("inf"))),
    "bytes that are text": (DropPrefix("paged", "a"), "drop_prefix", "str"),
    "infinitely many bytes": (DropPrefix("paged", "a"), "drop_prefix", float("inf")),
    "fewer than no bytes": (Clear("paged"), "clear", -1),
    "neither yes nor no": (Unpin("paged", "a"), "unpin", "yes"),
    "pins that are numbers": (Inspect("paged"), "pins", [1]),
}


class FaultyCache(FaultyPagedCache):
    """A paged cache with a wrong answer to an operator's command."""

    def __init__(self, setup: CacheSetup, options: FaultyPagedOptions) -> None:
        super().__init__(setup, options)
        _, method, found = WRONG[options.fault]
        setattr(self, method, lambda *_, **__: found)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_of_a_strategy_is_its_fault(tiny: Path, what: str) -> None:
    command, method, _ = WRONG[what]
    driver = warm(
        tiny, strategies=strategies(paged={"kind": f"{__name__}:FaultyCache", "block_size": 4, "fault": what})
    )
    with pytest.raises(RequestError, match=method) as refused:
        run_command(driver.engine, command)
    assert (refused.value.status, refused.value.code) == (500, "strategy_failed")
    assert driver.core.isolation.collect_faults() == {"paged": 1}
