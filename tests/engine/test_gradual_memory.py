"""An engine is ready before all of its KV memory is touched, and serves requests with what it has until then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_strategies import reserved_memory
from cache_strategies.arena import Arena
from server.engine import build
from server.engine.info import describe_caches, describe_memory, read_engine_state
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import Reference, random_prompt

MIB = 1 << 20
SYSTEM_PAGE = 4096
KINDS = ("paged", "contiguous", "sliding_window", "mirrored")
LONGEST = 64  # tokens
INSTANCES = strategies(
    paged={"kind": "paged", "block_size": 4},
    contiguous={"kind": "contiguous"},
    sliding_window={"kind": "sliding_window", "window": LONGEST},  # which forgets nothing
    mirrored={"kind": "mirrored"},
)
COUNT = 20  # requests


@pytest.fixture
def slow(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Return a function that builds an engine with the minimum of memory; `more` touches the rest."""
    monkeypatch.setattr(reserved_memory, "PIECE_BYTES", SYSTEM_PAGE)
    monkeypatch.setattr(build, "INITIAL_KV_BYTES", 0)
    monkeypatch.setattr(Arena, "touch_rest", lambda *_: None)

    def engine(kinds: tuple[str, ...] = KINDS, kernels: str = "auto") -> Driver:
        instances = {kind: INSTANCES[kind] for kind in kinds}
        limits = {"max_seq_len": LONGEST, "default_strategy": kinds[0]}
        return Driver(tiny, gradual=True, strategies=instances, kv_memory="1MiB", kernels=kernels, **limits)

    return engine


def more(driver: Driver, size: int) -> None:
    """Touch `size` more bytes at each end that is used."""
    memory = driver.core.arena._reserved
    if memory is not None:
        above = driver.core.arena.memory.nbytes - memory.high_start
        memory.touch(below=memory.low_end and memory.low_end + size, above=above and above + size)


def run_out(driver: Driver) -> None:
    """Let the system have no more memory for the arena."""
    memory = driver.core.arena._reserved
    assert memory is not None
    memory.touch_rest(lambda: 0)
    assert memory._thread is not None
    memory._thread.join()


def ask(driver: Driver, kinds: tuple[str, ...] = KINDS) -> dict[str, list[int]]:
    """Submit requests for all kinds in rotation, some of max_seq_len; return their prompts by id."""
    prompts = {str(i): random_prompt(8 + 7 * (i % 7), seed=i) for i in range(COUNT)}
    for i, (name, prompt) in enumerate(prompts.items()):
        driver.submit(name, prompt, 8 if i % 4 else LONGEST - len(prompt), kv_cache=kinds[i % len(kinds)])
    return prompts


def assert_right(driver: Driver, reference: Reference, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        told = driver.heard[name]
        assert told.finish_reason == "length", name
        assert told.tokens == reference.greedy(prompt, len(told.tokens)), name


def test_an_engine_is_ready_before_all_memory_is_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "touch_rest", lambda *_: None)
    driver = Driver(tiny, gradual=True, kv_memory="1GiB", max_num_seqs=4096)
    arena = driver.core.arena
    there = arena.num_usable_pages * arena.page_bytes
    assert build.INITIAL_KV_BYTES <= there < 4 * build.INITIAL_KV_BYTES < arena.total_pages * arena.page_bytes
    assert describe_memory(arena) == {"bytes": arena.memory.nbytes, "usable_bytes": there}
    for cache in driver.core.instances.values():
        driver.submit(cache.name, random_prompt(50), 4, kv_cache=cache.name)
    driver.run()
    state = read_engine_state(driver.engine, {})
    assert state.pool_held + state.pool_free == there
    assert there + state.pool_untouched == arena.memory.nbytes


def test_an_engine_that_is_built_by_itself_has_all_of_it(tiny: Path) -> None:
    arena = Driver(tiny, kv_memory="128MiB", max_num_seqs=4096).core.arena
    assert arena.num_usable_pages == arena.total_pages
    arena.memory.fill_(1)


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)])
def test_requests_wait_for_memory_and_get_the_same_answers(
    slow: Callable[..., Driver], reference: Reference, kinds: tuple[str, ...]
) -> None:
    """With memory that is touched late, while requests run, or at once."""
    for size, pause in ((SYSTEM_PAGE, 30), (2 * SYSTEM_PAGE, 3), (MIB, 1)):
        driver = slow(kinds)
        arena = driver.core.arena
        assert arena.num_usable_pages < arena.total_pages
        prompts = ask(driver, kinds)
        while driver.core.busy:
            driver.step()
            assert driver.limits.kv_bytes == arena.num_usable_pages * arena.page_bytes
            if len(driver.steps) % pause == 0:
                more(driver, size)
        assert_right(driver, reference, prompts)
        assert max(len(step.report.parts) for step in driver.steps) == len(kinds) or size == SYSTEM_PAGE
        more(driver, MIB)
        driver.step()
        assert arena.num_usable_pages == arena.total_pages
        driver.assert_nothing_leaked()


def test_plain_torch_writes_into_no_other_memory(slow: Callable[..., Driver], reference: Reference) -> None:
    """A write to untouched memory kills the process."""
    driver = slow(kernels="reference")
    prompts = ask(driver)
    driver.run()
    assert driver.core.arena.num_untouched_pages
    assert_right(driver, reference, prompts)


def test_a_request_of_any_length_runs_on_what_is_there_first(slow: Callable[..., Driver], reference: Reference) -> None:
    for kind in KINDS:
        driver = slow()
        prompt = random_prompt(LONGEST - 4, seed=5)
        heard = driver.submit(kind, prompt, 4, kv_cache=kind)
        driver.run()
        assert heard.tokens == reference.greedy(prompt, 4)
        assert heard.preempted == 0


def test_where_memory_runs_out_the_limit_is_what_there_is(
    slow: Callable[..., Driver], reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    """All requests are answered: running, waiting and later ones."""
    driver = slow()
    arena = driver.core.arena
    prompts = ask(driver)
    for _ in range(5):
        driver.step()
    more(driver, 2 * SYSTEM_PAGE)
    driver.step()
    assert not caplog.records
    run_out(driver)
    with caplog.at_level(logging.WARNING):
        driver.step()
    (record,) = caplog.records
    assert record.getMessage().startswith("memory has run out: of ")
    assert arena.num_usable_pages == arena.total_pages < arena.pages
    assert describe_memory(arena)["bytes"] == describe_memory(arena)["usable_bytes"] < MIB
    assert all(each["limit_bytes"] <= describe_memory(arena)["bytes"] for each in describe_caches(driver.engine))
    assert read_engine_state(driver.engine, {}).pool_untouched == 0
    driver.run()
    assert_right(driver, reference, prompts)
    later = random_prompt(LONGEST - 4, seed=6)
    for kind in KINDS:
        driver.submit(f"later {kind}", later, 4, kv_cache=kind)
    driver.run()
    assert_right(driver, reference, {f"later {kind}": later for kind in KINDS})
