"""The trees of cached prefixes of an engine: as its caches list them, without texts, and whatever a strategy does."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cache_strategies.types import CachedPrefix, Salt
from server.engine.admin import run_command
from server.engine.ipc.messages import PinPrefix
from server.engine.live import prefixes
from server.engine.live.prefixes import describe_prefixes
from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.isolation.faulty_strategies import FaultyPagedCache

PROMPT = random_prompt(40)
SETTINGS: dict[str, Any] = {"strategies": strategies(paged={"kind": "paged", "block_size": 4}), "max_seq_len": 64}


def read_trees(driver: Driver) -> dict[str, Any]:
    """Return the trees of all instances as a client reads them."""
    answer = json.loads(msgspec.json.encode(describe_prefixes(driver.core)))
    assert answer["object"] == "prefixes"
    instances: dict[str, Any] = answer["instances"]
    return instances


def test_two_prompts_with_a_common_beginning_are_children_of_it(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("first", [*PROMPT[:20], *range(5, 15)], 1, kv_cache="paged")
    driver.run()
    driver.submit("second", [*PROMPT[:20], *range(20, 30)], 9, kv_cache="paged")
    driver.submit("ring", PROMPT, 4, kv_cache="sliding_window")
    driver.step(), driver.step()
    pin = run_command(driver.engine, PinPrefix("paged", PROMPT[:20], 60.0))
    trees = read_trees(driver)
    assert trees.keys() == {"paged"}, "others have no shared prefixes"
    assert trees["paged"]["omitted"] == 0
    parent, *children = trees["paged"]["prefixes"]
    size = driver.block_bytes()
    assert {name: value for name, value in parent.items() if name not in ("id", "age_seconds")} == {
        "first_token": 0,
        "tokens": 20,
        "bytes": 5 * size,
        "references": 1,
        "hits": 1,
        "pins": [pin["id"]],
    }
    assert {each["parent"] for each in children} == {parent["id"]}
    idle, running = sorted(children, key=lambda each: each["references"])
    assert (idle["tokens"], idle["references"], running["tokens"], running["references"]) == (8, 0, 8, 1)
    assert idle["idle_seconds"] >= 0
    assert "idle_seconds" not in running
    assert "null" not in json.dumps(trees)


def test_tenants_and_salts_are_named_and_texts_are_not(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    for tenant, salt in (("", ""), ("you", ""), ("you", "mine")):
        driver.submit(f"{tenant} {salt}", PROMPT, 1, kv_cache="paged", tenant=tenant, cache_salt=salt)
    driver.run()
    listed = read_trees(driver)["paged"]["prefixes"]
    assert len({each["id"] for each in listed}) == len(listed) == 3
    assert {(each.get("tenant"), each.get("cache_salt")) for each in listed} == {
        (None, None),
        ("you", None),
        ("you", "mine"),
    }
    allowed = {"id", "tenant", "cache_salt", "first_token", "tokens", "bytes", "references", "hits", "pins"}
    assert all(each.keys() - allowed <= {"age_seconds", "idle_seconds"} for each in listed)


def test_a_long_list_says_how_many_are_left_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_LISTED_PREFIXES", 2)
    driver = Driver(tiny, **SETTINGS)
    for number in range(5):
        driver.submit(str(number), random_prompt(8, seed=number), 1, kv_cache="paged")
    driver.run()
    tree = read_trees(driver)["paged"]
    assert (len(tree["prefixes"]), tree["omitted"]) == (2, 3)


NODE = CachedPrefix("a", None, Salt(), 0, 4, 64, 0, 0, 1.0, None)
FAULTS: dict[str, Any] = {
    "raises": None,
    "nothing": (None,),
    "no number": ([NODE],),
    "a dict": (([{"id": "a"}], 0),),
    "a salt of another type": (([NODE._replace(salt=7)], 0),),
    "tokens that are no number": (([NODE._replace(num_tokens="many")], 0),),
    "a time that is no number": (([NODE._replace(age=float("nan"))], 0),),
    "pins that are no texts": (([NODE._replace(pins=[3])], 0),),
    "more than asked for": (([NODE] * (prefixes.MAX_LISTED_PREFIXES + 1), 0),),
    "without an end": ((itertools.repeat(NODE), 0),),
    "half of a surrogate pair": (([NODE._replace(id="\ud800")], 0),),
}


class FaultyCache(FaultyPagedCache):
    """A paged cache that lists its prefixes wrongly."""

    def list_prefixes(self, limit: int) -> Any:
        if (found := FAULTS[self.fault]) is None:
            raise RuntimeError("planted")
        return found[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_strategy_that_lists_wrongly_has_an_empty_list_and_a_fault(tiny: Path, fault: str) -> None:
    kind = {"kind": f"{__name__}:FaultyCache", "block_size": 4, "fault": fault}
    driver = Driver(tiny, **SETTINGS | {"strategies": strategies(paged=kind)})
    driver.submit("one", PROMPT, 9, kv_cache="paged")
    driver.step()
    for _ in range(9):
        assert read_trees(driver) == {"paged": {"prefixes": [], "omitted": 0}}
    assert driver.core.isolation.collect_faults() == {"paged": 9}
    assert not driver.core.isolation.quarantined, "no request needs the list"
    driver.run()
    assert driver.heard["one"].finish_reason == "length"


def test_an_instance_in_quarantine_has_an_empty_list(tiny: Path) -> None:
    driver = Driver(tiny, **SETTINGS)
    driver.submit("one", PROMPT, 1, kv_cache="paged")
    driver.run()
    driver.core.instances["paged"].suspend()
    assert read_trees(driver) == {"paged": {"prefixes": [], "omitted": 0}}
    assert not driver.core.isolation.collect_faults()
