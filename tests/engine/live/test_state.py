"""The live state of an engine agrees with the arena, the caches and the scheduler, whatever a strategy does."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_strategies.types import PageState
from server.engine.admin import run_command
from server.engine.ipc.messages import PinPrefix
from server.engine.live import pages
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


def read_cells(state: dict[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return (owners, states) of the cells."""
    owners, states = (np.frombuffer(base64.b64decode(state["cells"][n]), np.uint8) for n in ("owners", "states"))
    assert len(owners) == len(states)
    return owners, states


def count_states(state: dict[str, Any], instance: str) -> dict[str, int]:
    """Return how many cells of an instance are in each state."""
    owners, states = read_cells(state)
    own = states[owners == state["cells"]["instances"].index(instance) + 1]
    names = state["cells"]["state_names"]
    return {names[value]: int((own == value).sum()) for value in sorted(set(own.tolist()))}


class FaultyCache(FaultyPagedCache):
    """A paged cache that goes wrong where only the live state asks."""

    def bytes_for(self, num_tokens: int) -> int:
        if self.fault == "long texts" and num_tokens > 300:
            raise RuntimeError("planted")
        return super().bytes_for(num_tokens)

    def mark_pages(self, states: Any) -> None:
        if self.fault == "long texts":
            return super().mark_pages(states)
        states.fill_(77 if self.fault == "writes nonsense" else int(PageState.PINNED))
        if self.fault == "raises":
            raise RuntimeError("planted")


def with_fault(fault: str) -> dict[str, Any]:
    return SETTINGS | {
        "strategies": strategies(paged={"kind": f"{__name__}:FaultyCache", "block_size": 4, "fault": fault})
    }


def test_a_strategy_that_cannot_say_what_long_texts_take_goes_on(tiny: Path) -> None:
    driver = Driver(tiny, **with_fault("long texts") | {"max_seq_len": 400})
    for _ in range(9):
        assert read_live(driver)["instances"]["paged"]["fits"].keys() == {"256"}
    assert driver.core.isolation.collect_faults() == {"paged": 9}
    assert not driver.core.isolation.quarantined, "no request has asked for it"
    driver.submit("one", PROMPT, 3, kv_cache="paged")
    driver.run()
    assert len(driver.heard["one"].tokens) == 3


def test_cells_requests_and_instances_of_a_busy_engine(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("first", PROMPT, 4, kv_cache="paged")
    driver.run()
    run_command(driver.engine, PinPrefix("paged", PROMPT[:8], 60.0))
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.submit("ring", PROMPT[:5], 9, kv_cache="sliding_window", priority=3)
    driver.step(), driver.step()
    driver.submit("late", PROMPT[:5], 9, kv_cache="contiguous")
    state, arena = read_live(driver), driver.core.arena
    owners, states = read_cells(state)
    assert len(owners) == arena.pages
    assert state["cells"]["pages_per_cell"] == 1
    for number, name in enumerate(state["cells"]["instances"], 1):
        assert (owners == number).sum() == arena.num_held_pages(name)
    assert ((owners == 0) == (states == PageState.FREE)).all()
    assert (states == PageState.FREE).sum() == arena.num_free_pages
    blocks = state["instances"]["paged"]["blocks"]
    assert count_states(state, "paged") == {"idle": blocks["idle"], "in_use": 9, "pinned": 2}
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


def test_a_large_arena_is_sampled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.step()
    owners, states = read_cells(read_live(driver))
    monkeypatch.setattr(pages, "MAX_CELLS", 50)
    state = read_live(driver)
    step = state["cells"]["pages_per_cell"]
    assert step == -(-driver.core.arena.pages // 50)
    fewer_owners, fewer_states = read_cells(state)
    assert (fewer_owners == owners[::step]).all()
    assert (fewer_states == states[::step]).all()


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
    cache, seats = driver.core.instances[name], []
    for number in range(fits["64"] + 1):
        seat = cache.open([number + 1, *range(100, 163)])  # nothing is shared
        if seat is not None and not cache.strategy.grow(seat, 64 - seat.length):
            cache.close(seat)
            seat = None
        if seat is None:
            break
        seats.append(seat)
    assert len(seats) == fits["64"]
    assert fits["64"] > 1
    for seat in seats:
        cache.close(seat)


@pytest.mark.parametrize("fault", ["raises", "writes nonsense", "marks pages of others"])
def test_a_strategy_that_marks_wrongly_hurts_no_other(tiny: Path, fault: str) -> None:
    driver = Driver(tiny, **with_fault(fault))
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.submit("ring", PROMPT[:5], 9, kv_cache="sliding_window")
    driver.step()
    state = read_live(driver)
    expected = "pinned" if fault == "marks pages of others" else "in_use"
    assert list(count_states(state, "paged")) == [expected]
    assert list(count_states(state, "sliding_window")) == ["in_use"]
    driver.run()
    assert driver.heard["ring"].finish_reason == driver.heard["one"].finish_reason == "length"
