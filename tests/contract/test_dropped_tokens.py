"""How many tokens windows, compactions and budgets drop. What count_visible() says is a promise of all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.features import Budgeted
from cache_strategies.visible import count_dropped_tokens
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import gather, step
from plugin_kit.driver.texts import MODEL, random_text, rotate
from tests.contract.harness import World, every_instance

LENGTH = 110
MODELS: Mapping[str, Sequence[LayerSpec]] = {
    "full and window": MODEL,
    "windows": (
        LayerSpec(1, 2, 4, 4, window=9, rotate=rotate),
        LayerSpec(3, 3, 4, 4, window=1, rotate=rotate),
        LayerSpec(2, 2, 4, 4, window=50, rotate=rotate),
    ),
    "full": (LayerSpec(2, 2, 4, 4, rotate=rotate),),
}


def make_world(name: str, settings: StrategySettings, model: str) -> World:
    return World({name: settings}, layers=MODELS[model], max_seats=2)


@pytest.fixture(scope="module", autouse=True)
def backend() -> str:
    """Replace the fixture of all backends: the count is of the strategy's bookkeeping."""
    return "reference"


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"window": 5, "sinks": 2}, 110 - 4 - 2),
        ({"window": 5, "sinks": 0}, 110 - 4),
        ({"window": 1, "sinks": 0}, 110),
        ({"window": 110, "sinks": 0}, 1),
        ({"window": 111, "sinks": 0}, 0),
        ({"window": 40, "sinks": 80}, 0),
        ({"window": 512, "sinks": 4}, 0),
    ],
    ids=str,
)
def test_a_window_drops_all_but_its_latest_tokens_and_the_sinks(options: dict[str, Any], dropped: int) -> None:
    world = make_world("ring", StrategySettings(kind="sliding_window", **options), "full")
    reading = world.open("ring", random_text(1, LENGTH, MODELS["full"]))
    while reading.left:
        step([(reading, reading.chunk(30))])
    assert count_dropped_tokens(reading.cache, reading.sequence.length) == dropped


def test_a_fork_has_lost_what_its_parent_has_lost() -> None:
    world = make_world("ring", StrategySettings(kind="sliding_window", window=8, sinks=3), "full and window")
    reading = world.open("ring", random_text(1, LENGTH, MODEL))
    while reading.left:
        step([(reading, reading.chunk(7))])
    child = reading.sequence.fork()
    assert child is not None
    assert child.length == LENGTH
    keys = []
    for sequence in (reading.sequence, child):
        assert sequence.reserve(1)
        rows = Rows([sequence], [1])
        reading.cache.locate(rows)
        keys.append([gather(reading.cache, rows, 0, layer)[2].tolist() for layer in range(len(MODEL))])
    assert keys[0] == keys[1]
    assert len(keys[0][0]) == 8 + 3
    assert count_dropped_tokens(reading.cache, LENGTH) > 0


@pytest.mark.fuzz
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", every_instance())
def test_a_compaction_says_that_it_dropped_tokens_and_leaves_no_more_than_the_budget(name: str, model: str) -> None:
    world = make_world(name, every_instance()[name], model)
    reading = world.open(name, random_text(2, LENGTH, MODELS[model]))
    cache = reading.cache
    sequence = reading.sequence
    compact, compacts = sequence.compact, type(sequence).compact is not KVSequence.compact

    def compact_and_check() -> bool:
        has_dropped, length, budget = compact(), sequence.length, find_budget(cache, sequence.length)
        before, after = (count_dropped_tokens(cache, each) for each in (length - 1, length))
        assert has_dropped or after <= before
        assert not has_dropped or (budget is not None and length - after <= budget)
        return has_dropped

    if compacts:
        sequence.compact = compact_and_check  # type: ignore[method-assign]
    while reading.left:
        step([(reading, reading.chunk(random.choice([1, 4, 30])))])
        budget = find_budget(cache, sequence.length)
        assert budget is None or 0 <= budget <= sequence.length
        assert not cache.contract.exact or budget in (None, sequence.length)
        if name.startswith("sliding_window"):  # it drops a token with each that enters
            assert sequence.length - count_dropped_tokens(cache, sequence.length) == budget


def find_budget(cache: KVCache, length: int) -> int | None:
    return cache.budget(length) if isinstance(cache, Budgeted) else None


def test_a_compaction_that_frees_only_what_no_window_needs_drops_no_token() -> None:
    """At 16 tokens a window of 50 needs all of them; the others free keys, and no token is missed."""
    options = {"budget": 20, "every": 16, "recent": 4, "block_size": 8}
    world = make_world("it", StrategySettings(kind="compressed", **options), "windows")
    reading = world.open("it", random_text(3, 40, MODELS["windows"]))
    compact = reading.sequence.compact
    returned: dict[int, tuple[bool, int]] = {}

    def note() -> bool:
        has_dropped, length = compact(), reading.sequence.length
        returned[length] = has_dropped, count_dropped_tokens(reading.cache, length)
        return has_dropped

    reading.sequence.compact = note  # type: ignore[method-assign]
    while reading.left:
        step([(reading, reading.chunk(8))])
    assert returned == {length: (length % 16 == 0, 0) for length in (8, 16, 24, 32, 40)}


@pytest.mark.parametrize(
    ("kind", "options", "budget"),
    [
        ("paged", {}, None),
        ("contiguous", {}, None),
        # Two KV heads without a window keep 4 + 4 of 100 tokens; one with a window of 24 lacks 19 of those it would use
        ("sliding_window", {"window": 5, "sinks": 4}, 100 - (92 + 92 + 19) // 3),
        # ... keep 20; that with a window keeps all that it would use
        ("compressed", {"budget": 20, "every": 16, "recent": 4}, 100 - (80 + 80 + 0) // 3),
        ("compressed", {"budget": 0.3, "every": 16, "recent": 4, "by_head": True}, 100 - (70 + 70 + 0) // 3),
        ("compressed", {"budget": 200}, 100),
    ],
    ids=str,
)
def test_a_budget_is_the_mean_over_heads_of_what_they_keep(
    kind: str, options: dict[str, Any], budget: int | None
) -> None:
    world = make_world("it", StrategySettings(kind=kind, **options), "full and window")
    assert find_budget(world.caches["it"], 100) == budget
