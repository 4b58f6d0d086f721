"""A block is described as the live state shows it, with what its instance knows about it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cache_strategies import spaces
from cache_strategies.memory import Region
from cache_strategies.types import BlockInfo, BlockState
from server.engine.admin import run_command
from server.engine.ipc.messages import DescribeBlock, PinPrefix
from server.engine.live.blocks import describe_regions
from server.engine.scheduling.request import RequestError
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.isolation.faulty_strategies import FaultyPagedCache

PROMPT = random_prompt(40)
SETTINGS: dict[str, Any] = {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "max_seq_len": 64}


DESCRIPTIONS: dict[str, Any] = {
    "raises": None,
    "a number": 7,
    "a token that is text": BlockInfo("0", 1, 0, 0),
    "a prefix that is a number": BlockInfo(0, 1, 0, 0, idle=1.0, prefix=7),
}


class FaultyCache(FaultyPagedCache):
    """A paged cache that describes its blocks wrongly, or spoils the list of their states."""

    def describe_block(self, region: Region, block: int) -> Any:
        if self.fault == "raises":
            raise RuntimeError("planted")
        return DESCRIPTIONS.get(self.fault) or super().describe_block(region, block)

    def mark_blocks(self, region: Region, states: Tensor) -> None:
        super().mark_blocks(region, states)
        if self.fault == "spoils states":
            states.resize_(1)


@pytest.fixture(params=["address ranges", "one tensor"])
def space(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the regions lie in ranges of their own, or between the blocks of each other."""
    if request.param == "one tensor":
        monkeypatch.setattr(spaces, "can_reserve_addresses", lambda: False)


def busy(tiny: Path, fault: str | None = None) -> Driver:
    """Return an engine with idle, pinned and used blocks of all strategies."""
    faulty = strategies(paged={"kind": f"{__name__}:FaultyCache", "block_size": 4, "fault": fault})
    driver = Driver(tiny, **SETTINGS if fault is None else SETTINGS | {"strategies": faulty})
    for name in ("paged", "contiguous"):
        driver.submit(f"first {name}", PROMPT, 4, kv_cache=name)
    driver.run()
    run_command(driver.engine, PinPrefix("paged", PROMPT[:8], 60.0))
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.submit("ring", PROMPT[:5], 9, kv_cache="sliding_window")
    driver.step(), driver.step()
    return driver


def read_states(region: dict[str, Any]) -> bytes:
    return base64.b64decode(region["states"])


def read_block(driver: Driver, name: str, region: int, block: int) -> dict[str, Any]:
    """Return the description of a block as a client reads it."""
    answer = run_command(driver.engine, DescribeBlock(name, region, block))
    description: dict[str, Any] = json.loads(json.dumps(answer))
    assert (description["instance"], description["region"], description["block"]) == (name, region, block)
    return description


def read_blocks(driver: Driver, name: str) -> list[dict[str, Any]]:
    """Return the descriptions of the blocks that an instance holds in its only region."""
    states = read_states(describe_regions(driver.core)[f"{name}/0"])
    return [read_block(driver, name, 0, block) for block, state in enumerate(states) if state]


@pytest.mark.usefixtures("space")
def test_every_block_has_the_state_of_its_cell(tiny: Path) -> None:
    driver, found = busy(tiny), set()
    for key, region in describe_regions(driver.core).items():
        name, number = key.split("/")
        states = [BlockState(state).name.lower() for state in read_states(region)]
        assert [read_block(driver, name, int(number), block)["state"] for block in range(len(states))] == states
        found |= {(name, state) for state in states if state != "free"}
    assert found == {
        ("paged", "idle"),
        ("paged", "in_use"),
        ("paged", "pinned"),
        ("contiguous", "idle"),
        ("sliding_window", "in_use"),
    }


@pytest.mark.usefixtures("space")
def test_blocks_say_which_tokens_they_hold(tiny: Path) -> None:
    driver = busy(tiny)
    own = read_blocks(driver, "paged")
    used = [each for each in own if each["references"]]
    assert sorted((each["first_token"], each["tokens"]) for each in used) == [
        *((first, 4) for first in range(0, 40, 4)),
        (40, 1),
    ]
    assert Counter(each["num_pins"] for each in own)[1] == 2
    assert all("prefix" in each and "age_seconds" in each for each in used if each["first_token"] < 36)
    assert all(("idle_seconds" in each) == (each["state"] == "idle") for each in own)
    (idle,) = read_blocks(driver, "contiguous")
    assert (idle["first_token"], idle["tokens"], idle["references"]) == (0, 43, 0)
    ring, *_ = read_blocks(driver, "sliding_window")
    assert ring.keys() == {"instance", "region", "block", "state"}, "it says nothing about its blocks"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("another", 0, 0), "there is no cache strategy 'another'"),
        (("paged", -1, 0), "there is no region -1: strategy 'paged' has 1 regions"),
        (("paged", 1, 0), "there is no region 1"),
        (("paged", 0, -1), "there is no block -1: region 0 of strategy 'paged' has"),
        (("paged", 0, 10**9), "there is no block 1000000000"),
    ],
)
def test_a_block_that_does_not_exist_is_an_error(tiny: Path, place: tuple[str, int, int], message: str) -> None:
    driver = Driver(tiny, **SETTINGS)
    with pytest.raises(RequestError, match=message) as refused:
        run_command(driver.engine, DescribeBlock(*place))
    assert (refused.value.status, refused.value.code) == (404, "not_found")


@pytest.mark.parametrize("fault", DESCRIPTIONS)
def test_a_strategy_that_describes_wrongly_says_nothing_and_has_a_fault(tiny: Path, fault: str) -> None:
    driver = busy(tiny, fault)
    block = next(i for i, state in enumerate(read_states(describe_regions(driver.core)["paged/0"])) if state)
    driver.core.isolation.collect_faults()
    for _ in range(9):
        assert read_block(driver, "paged", 0, block).keys() == {"instance", "region", "block", "state"}
    assert driver.core.isolation.collect_faults() == {"paged": 9}
    assert not driver.core.isolation.quarantined, "no request needs it"


def test_a_strategy_that_spoils_the_states_is_alone_affected(tiny: Path) -> None:
    right, faulty = (busy(tiny, fault) for fault in (None, "spoils states"))
    faulty.core.isolation.collect_faults()
    expected, found = (describe_regions(driver.core) for driver in (right, faulty))
    spoiled = found.pop("paged/0")
    states = read_states(expected.pop("paged/0"))
    assert found == expected
    assert read_states(spoiled) == bytes(BlockState.IN_USE if state else BlockState.FREE for state in states)
    assert faulty.core.isolation.collect_faults() == {"paged": 1}
    assert not faulty.core.isolation.quarantined
