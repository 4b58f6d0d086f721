"""An engine takes memory from the system as it needs it, and goes on with what there is if the system has no more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cache_strategies import address_ranges
from cache_strategies.memory import RECOVERY_SECONDS
from server.engine import build
from server.engine.info import describe_caches, describe_memory, read_engine_state
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

KINDS = ("paged", "contiguous", "sliding_window", "mirrored")
LONGEST = 64  # tokens
SETTINGS = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        contiguous={"kind": "contiguous"},
        sliding_window={"kind": "sliding_window", "window": LONGEST},  # which forgets nothing
        mirrored={"kind": "mirrored"},
    ),
    "max_seq_len": LONGEST,
    "kv_memory": "1MiB",
}
COUNT = 20  # requests
GIB = 1 << 30


class System:
    """The memory of an operating system: how many bytes it says are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = GIB
        monkeypatch.setattr(build, "free_memory", lambda _: self.free)
        monkeypatch.setattr(address_ranges, "CHECK_INTERVAL_BYTES", 1)  # it is asked for each block


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def ask(driver: Driver) -> dict[str, list[int]]:
    """Submit requests for all kinds in rotation, some of max_seq_len; return their prompts by id."""
    prompts = {str(i): random_prompt(8 + 7 * (i % 7), seed=i) for i in range(COUNT)}
    for i, (name, prompt) in enumerate(prompts.items()):
        driver.submit(name, prompt, 8 if i % 4 else LONGEST - len(prompt), kv_cache=KINDS[i % len(KINDS)])
    return prompts


def assert_right(driver: Driver, reference: Reference, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        told = driver.heard[name]
        assert told.finish_reason == "length", name
        assert told.tokens == reference.greedy(prompt, len(told.tokens)), name


def test_memory_is_taken_as_it_is_needed(tiny: Path) -> None:
    driver = Driver(tiny, kv_memory="1GiB", max_num_seqs=4096)
    memory = driver.core.memory
    assert memory.space.warm_bytes < GIB // 100
    for name in driver.core.instances:
        driver.submit(name, random_prompt(50), 4, kv_cache=name)
    driver.run()
    state, warm = read_engine_state(driver.engine, {}), memory.space.warm_bytes
    assert memory.held_bytes <= warm < GIB // 10
    assert state.pool_held + state.pool_warm == warm
    assert warm + state.pool_cold == GIB
    assert describe_memory(memory) == {"bytes": GIB, "warm_bytes": warm}
    for name in driver.core.instances:
        driver.submit(f"again {name}", random_prompt(50, seed=1), 4, kv_cache=name)
    driver.run()
    assert memory.space.warm_bytes < 2 * warm, "what is free is used again"


def test_all_of_it_is_taken_at_the_start_if_that_is_wanted(tiny: Path) -> None:
    driver = Driver(tiny, kv_memory="128MiB", max_num_seqs=4096, kv_memory_at_start=True)
    memory = driver.core.memory
    assert 0.95 * memory.total_bytes < memory.space.warm_bytes <= memory.total_bytes
    for name in driver.core.instances:
        driver.submit(name, random_prompt(50), 4, kv_cache=name)
    driver.run()
    assert memory.space.warm_bytes <= memory.total_bytes, "it moves to who needs it"


def test_where_memory_runs_out_the_limit_is_what_there_is(
    tiny: Path, system: System, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """All requests are answered: running, waiting and later ones; and all memory counts again once there is some."""
    now = [100.0]
    driver = Driver(tiny, **SETTINGS)
    memory = driver.core.memory
    memory._clock = lambda: now[0]
    prompts = ask(driver)
    driver.step()
    assert not caplog.records
    system.free = 0
    with caplog.at_level(logging.WARNING):
        driver.run()
    assert caplog.records[0].getMessage().startswith("memory has run out: of ")
    assert_right(driver, reference, prompts)
    total = memory.total_bytes
    assert total < memory.planned_bytes
    assert driver.limits.kv_bytes == describe_memory(memory)["bytes"] == total
    assert all(each["limit_bytes"] <= total for each in describe_caches(driver.engine))
    system.free = GIB
    driver.step()
    assert memory.total_bytes == total, "the system is not asked at once"
    now[0] += RECOVERY_SECONDS
    with caplog.at_level(logging.WARNING):
        driver.step()
    assert caplog.records[-1].getMessage().startswith("the system has memory again")
    assert driver.limits.kv_bytes == memory.total_bytes == memory.planned_bytes
    later = random_prompt(LONGEST - 4, seed=6)
    for kind in KINDS:
        driver.submit(f"later {kind}", later, 4, kv_cache=kind)
    driver.run()
    assert_right(driver, reference, {f"later {kind}": later for kind in KINDS})
    driver.assert_nothing_leaked()
