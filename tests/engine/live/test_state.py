"""The live state of an engine agrees with the memory's books, the caches and the queue, whatever a strategy does."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_strategies.memory import Region
from cache_strategies.types import BlockState, Geometry, Sizes
from server.engine.admin import run_command
from server.engine.ipc.messages import PinPrefix
from server.engine.live import blocks
from server.engine.live import state as live_state
from server.engine.live.state import describe_live
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.isolation.faulty_strategies import FaultyPagedCache

PROMPT = random_prompt(40)
SETTINGS: dict[str, Any] = {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "max_seq_len": 64}


def read_live(driver: Driver) -> dict[str, Any]:
    """Return the live state as a client reads it."""
    state: dict[str, Any] = json.loads(json.dumps(describe_live(driver.engine)))
    return state


def read_states(region: dict[str, Any]) -> NDArray[np.uint8]:
    return np.frombuffer(base64.b64decode(region["states"]), np.uint8)


def count_states(state: dict[str, Any], instance: str) -> dict[str, int]:
    """Return how many blocks that an instance holds in its first region are in each state."""
    found = Counter(read_states(state["regions"][f"{instance}/0"]).tolist())
    return {state["block_states"][value]: count for value, count in sorted(found.items()) if value != BlockState.FREE}


class FaultyCache(FaultyPagedCache):
    """A paged cache that goes wrong where only the live state asks."""

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        sizes = super().sizes(options, geometry)

        def count_blocks(num_tokens: int) -> Sequence[int]:
            if options.fault == "one length" and num_tokens == 256:
                raise RuntimeError("planted")
            return sizes.count_blocks(num_tokens)

        return sizes._replace(count_blocks=count_blocks)

    def mark_blocks(self, region: Region, states: Any) -> None:
        if self.fault == "one length":
            return super().mark_blocks(region, states)
        states.fill_(77 if self.fault == "writes nonsense" else int(BlockState.PINNED))
        if self.fault == "raises":
            raise RuntimeError("planted")


def with_fault(fault: str) -> dict[str, Any]:
    return SETTINGS | {
        "strategies": strategies(paged={"kind": f"{__name__}:FaultyCache", "block_size": 4, "fault": fault})
    }


def test_a_strategy_that_cannot_say_what_some_texts_take_goes_on(tiny: Path) -> None:
    driver = Driver(tiny, **with_fault("one length") | {"max_seq_len": 400})
    for _ in range(9):
        assert read_live(driver)["instances"]["paged"]["fits"].keys() == {"400"}
    assert driver.core.isolation.collect_faults() == {"paged": 9}
    assert not driver.core.isolation.quarantined, "no request has asked for it"
    driver.submit("one", PROMPT, 3, kv_cache="paged")
    driver.run()
    assert len(driver.heard["one"].tokens) == 3


def test_blocks_requests_and_instances_of_a_busy_engine(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("first", PROMPT, 4, kv_cache="paged")
    driver.run()
    run_command(driver.engine, PinPrefix("paged", PROMPT[:8], 60.0))
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.submit("ring", PROMPT[:5], 9, kv_cache="sliding_window", priority=3)
    driver.step(), driver.step()
    driver.submit("late", PROMPT[:5], 9, kv_cache="contiguous")
    state, memory = read_live(driver), driver.core.memory
    for name in driver.core.instances:
        own = [each for each in state["regions"].values() if each["instance"] == name]
        assert [each["what"] for each in own] == [each.what for each in memory.list_regions(name)]
        assert all(each["blocks_per_cell"] == 1 for each in own)
        held = [int((read_states(each) != BlockState.FREE).sum()) for each in own]
        assert held == [each["held_blocks"] for each in own]
        assert sum(n * each["block_bytes"] for n, each in zip(held, own, strict=True)) == memory.get_held_bytes(name)
    held_bytes = sum(each["held_blocks"] * each["block_bytes"] for each in state["regions"].values())
    assert held_bytes == state["memory"]["bytes"] - state["memory"]["free_bytes"] == memory.held_bytes > 0
    by_state = state["instances"]["paged"]["blocks"]
    assert count_states(state, "paged") == {"idle": by_state["idle"], "in_use": 9, "pinned": 2}
    assert list(count_states(state, "sliding_window")) == ["in_use"]
    requests = {each["id"]: each for each in state["requests"].values()}
    one, late = requests["one"], requests["late"]
    assert (one["state"], one["prompt_tokens"], one["cached_tokens"], one["generated_tokens"]) == ("running", 40, 36, 2)
    assert one["computed_tokens"] == 41
    assert one["time_to_first_token"] > 0
    assert (late["state"], late["computed_tokens"]) == ("waiting", 0)
    assert "cached_tokens" not in late
    assert requests["ring"]["priority"] == 3
    assert (state["num_running"], state["num_waiting"]) == (2, 1)
    running = {name: (each["running"], each["waiting"]) for name, each in state["instances"].items()}
    assert running == {"paged": (1, 0), "sliding_window": (1, 0), "contiguous": (0, 1)}
    assert state["memory"]["weight_bytes"] == driver.core.model.weight_bytes
    assert str(PROMPT[0]) not in state["requests"]


def test_no_member_is_null_so_that_changes_can_be_merged(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("waits", PROMPT, 4)
    assert "null" not in json.dumps(describe_live(driver.engine))
    driver.step()
    assert "null" not in json.dumps(describe_live(driver.engine))


def test_a_region_of_many_blocks_is_sampled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.step()
    states = read_states(read_live(driver)["regions"]["paged/0"])
    monkeypatch.setattr(blocks, "MAX_CELLS", 5)
    region = read_live(driver)["regions"]["paged/0"]
    step = region["blocks_per_cell"]
    assert step == -(-len(states) // 5) > 1
    assert (read_states(region) == states[::step]).all()
    assert region["held_blocks"] == (states != BlockState.FREE).sum()


def test_many_requests_are_listed_in_part(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "MAX_LISTED_REQUESTS", 3)
    driver = Driver(tiny, **SETTINGS)
    for number in range(5):
        driver.submit(f"request {number}", PROMPT, 4)
    state = read_live(driver)
    assert (len(state["requests"]), state["num_waiting"]) == (3, 5)


@pytest.mark.parametrize("name", ["paged", "contiguous", "sliding_window"])
def test_as_many_texts_fit_as_it_says(tiny: Path, name: str) -> None:
    driver = Driver(tiny, **SETTINGS, max_num_seqs=256, kv_memory="2MiB")
    driver.submit("first", PROMPT, 4, kv_cache=name)
    driver.run()
    fits = read_live(driver)["instances"][name]["fits"]
    cache, opened = driver.core.instances[name], []
    for number in range(fits["64"] + 1):
        sequence = cache.open([number + 1, *range(100, 163)])  # nothing is shared
        if sequence is not None and not sequence.reserve(64 - sequence.length):
            sequence.close()
            sequence = None
        if sequence is None:
            break
        opened.append(sequence)
    assert len(opened) == fits["64"]
    assert fits["64"] > 1
    for sequence in opened:
        sequence.close()


@pytest.mark.parametrize("fault", ["raises", "writes nonsense", "marks free blocks"])
def test_a_strategy_that_marks_wrongly_hurts_no_other(tiny: Path, fault: str) -> None:
    driver = Driver(tiny, **with_fault(fault))
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.submit("ring", PROMPT[:5], 9, kv_cache="sliding_window")
    driver.step()
    state = read_live(driver)
    expected, held = "pinned" if fault == "marks free blocks" else "in_use", state["regions"]["paged/0"]["held_blocks"]
    assert count_states(state, "paged") == {expected: held}
    assert list(count_states(state, "sliding_window")) == ["in_use"]
    driver.run()
    assert driver.heard["ring"].finish_reason == driver.heard["one"].finish_reason == "length"
