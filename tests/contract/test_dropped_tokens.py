"""count_dropped_tokens() says how many keys the next token lacks, compared with the keys that it then attends to."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from cache_strategies import plugins, registry
from config.settings import StrategySettings
from kernels.types import LayerSpec
from tests.contract.harness import MODEL, Keys, World, every_instance, random_text, step

LENGTH = 110
DROPPING = ("random_drop", "random_drop_by_head")
MODELS: Mapping[str, Sequence[LayerSpec]] = {
    "full and window": MODEL,
    "windows": (LayerSpec(1, 2, 4, 4, window=9), LayerSpec(3, 3, 4, 4, window=1), LayerSpec(2, 2, 4, 4, window=50)),
    "full": (LayerSpec(2, 2, 4, 4),),
}


def count_missing(keys: Sequence[Keys], layers: Sequence[LayerSpec], position: int) -> int:
    """Return how many keys the token at a position lacks beside the model's own attention, as a mean over KV heads.

    `keys` are by layer what it attended to. A token is not missed in the layers in which it is outside of the window.
    """
    missing, num_heads = 0, 0
    for (_, _, positions), spec in zip(keys, layers, strict=True):
        used = {p for p in range(position) if spec.window is None or position - p < spec.window}
        by_head = positions.view(len(positions), -1).expand(-1, spec.num_kv_heads)
        for head in range(spec.num_kv_heads):
            missing += len(used - {*by_head[:, head].tolist()})
            num_heads += 1
    return missing // num_heads


def make_world(name: str, settings: StrategySettings, model: str) -> World:
    return World({name: settings}, layers=MODELS[model], max_seats=2)


def instances() -> dict[str, StrategySettings]:
    """Return instances of all built-in kinds, and of those of the tests that drop tokens."""
    sieves = {f"sieve_{keep}": StrategySettings(kind="sieve", keep=keep) for keep in (1, 2, 5)}
    return every_instance() | sieves | {kind: StrategySettings(kind=kind) for kind in DROPPING}


@pytest.fixture(scope="module", autouse=True)
def backend() -> str:
    """Replace the fixture of all backends: the count is of the strategy's bookkeeping."""
    return "reference"


@pytest.fixture(autouse=True)
def _installed(_kinds_are_installed: None) -> Iterator[None]:
    """Register a further kind; after the others, and removed before them."""
    point = EntryPoint("sieve", "tests.contract.third_party_strategy:SieveCache", registry.ENTRY_POINT_GROUP)
    before = plugins.entry_points
    sieve = [point]

    def entry_points(*, group: str) -> list[Any]:
        return [*before(group=group), *(sieve if group == point.group else ())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", entry_points)
        yield


@pytest.mark.fuzz
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", instances())
def test_dropped_tokens_are_those_that_the_next_token_lacks(name: str, model: str) -> None:
    layers = MODELS[model]
    world = make_world(name, instances()[name], model)
    reading = world.open(name, random_text(1, LENGTH, layers))
    cache = reading.cache
    while reading.left:
        position, counted = reading.seat.length, cache.count_dropped_tokens(reading.seat)
        size = reading.chunk(random.choice([1, 1, 1, 4, 30]))
        result = step([(reading, size)], keys=size == 1)
        if size == 1:  # the row's only token is the next token of the count
            assert counted == count_missing(result.keys[0], layers, position)
        assert 0 <= counted <= position
        assert not (cache.contract.exact and counted)


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
    assert reading.cache.count_dropped_tokens(reading.seat) == dropped


def test_a_fork_has_lost_what_its_parent_has_lost() -> None:
    world = make_world("ring", StrategySettings(kind="sliding_window", window=8, sinks=3), "full and window")
    reading = world.open("ring", random_text(1, LENGTH, MODEL))
    while reading.left:
        step([(reading, reading.chunk(7))])
    child = reading.cache.fork(reading.seat)
    assert child is not None
    assert reading.cache.count_dropped_tokens(child) == reading.cache.count_dropped_tokens(reading.seat) > 0
