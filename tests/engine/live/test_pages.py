"""A page is described as the live state shows it, with what its owner knows about it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cache_strategies.types import PageInfo
from server.engine.admin import run_command
from server.engine.ipc.messages import DescribePage, PinPrefix
from server.engine.live.pages import describe_cells
from server.engine.scheduling.request import RequestError
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.isolation.faulty_strategies import FaultyPagedCache

PROMPT = random_prompt(40)
SETTINGS: dict[str, Any] = {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "max_seq_len": 64}


DESCRIPTIONS: dict[str, Any] = {
    "raises": None,
    "a number": 7,
    "a token that is text": PageInfo("0", 1, 0, 0),
    "a prefix that is a number": PageInfo(0, 1, 0, 0, idle=1.0, prefix=7),
}


class FaultyCache(FaultyPagedCache):
    """A paged cache that describes its pages wrongly, or spoils the list of their states."""

    def describe_page(self, page: int) -> Any:
        if self.fault == "raises":
            raise RuntimeError("planted")
        return DESCRIPTIONS.get(self.fault) or super().describe_page(page)

    def mark_pages(self, states: Tensor) -> None:
        super().mark_pages(states)
        if self.fault == "spoils states":
            states.resize_(1)


def busy(tiny: Path, fault: str | None = None) -> Driver:
    """Return an engine with idle, pinned and used pages of all strategies."""
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


def read_page(driver: Driver, page: int) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(json.dumps(run_command(driver.engine, DescribePage(page))))
    assert description["page"] == page
    return description


def test_every_page_has_the_owner_and_the_state_of_its_cell(tiny: Path) -> None:
    driver = busy(tiny)
    cells = describe_cells(driver.core)
    owners, states = (base64.b64decode(cells[name]) for name in ("owners", "states"))
    names = [None, *cells["instances"]]
    pages = [read_page(driver, page) for page in range(driver.core.arena.pages)]
    assert [each.get("owner") for each in pages] == [names[number] for number in owners]
    assert [each["state"] for each in pages] == [cells["state_names"][number] for number in states]
    assert {(each.get("owner"), each["state"]) for each in pages} == {
        (None, "free"),
        ("paged", "idle"),
        ("paged", "in_use"),
        ("paged", "pinned"),
        ("contiguous", "idle"),
        ("sliding_window", "in_use"),
    }


def test_pages_say_which_tokens_they_hold(tiny: Path) -> None:
    driver = busy(tiny)
    pages = [read_page(driver, page) for page in range(driver.core.arena.pages)]
    own = [each for each in pages if each.get("owner") == "paged"]
    used = [each for each in own if each["references"]]
    assert sorted((each["first_token"], each["tokens"]) for each in used) == [
        *((first, 4) for first in range(0, 40, 4)),
        (40, 1),
    ]
    assert Counter(each["num_pins"] for each in own)[1] == 2
    assert all("prefix" in each and "age_seconds" in each for each in used if each["first_token"] < 36)
    assert all(("idle_seconds" in each) == (each["state"] == "idle") for each in own)
    idle = next(each for each in pages if each.get("owner") == "contiguous")
    assert (idle["first_token"], idle["tokens"], idle["references"]) == (0, 43, 0)
    ring = next(each for each in pages if each.get("owner") == "sliding_window")
    assert ring.keys() == {"page", "owner", "state"}, "it says nothing about its pages"


@pytest.mark.parametrize("page", [-1, 10**9])
def test_a_page_that_does_not_exist_is_an_error(tiny: Path, page: int) -> None:
    driver = Driver(tiny, **SETTINGS)
    with pytest.raises(RequestError, match=f"there is no page {page}") as refused:
        run_command(driver.engine, DescribePage(page))
    assert (refused.value.status, refused.value.code) == (404, "not_found")


@pytest.mark.parametrize("fault", DESCRIPTIONS)
def test_a_strategy_that_describes_wrongly_says_nothing_and_has_a_fault(tiny: Path, fault: str) -> None:
    driver = busy(tiny, fault)
    cells = describe_cells(driver.core)
    page = base64.b64decode(cells["owners"]).index(cells["instances"].index("paged") + 1)
    driver.core.isolation.collect_faults()
    for _ in range(9):
        assert read_page(driver, page).keys() == {"page", "owner", "state"}
    assert driver.core.isolation.collect_faults() == {"paged": 9}
    assert not driver.core.isolation.quarantined, "no request needs it"


def test_a_strategy_that_spoils_the_states_is_alone_affected(tiny: Path) -> None:
    right, faulty = (busy(tiny, fault) for fault in (None, "spoils states"))
    faulty.core.isolation.collect_faults()
    expected, found = (describe_cells(driver.core) for driver in (right, faulty))
    assert found["owners"] == expected["owners"]
    assert len(found["states"]) == len(expected["states"])
    assert faulty.core.isolation.collect_faults() == {"paged": 1}
    assert not faulty.core.isolation.quarantined
