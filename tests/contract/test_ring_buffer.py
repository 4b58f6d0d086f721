"""A ring shorter than the text attends as the masked definition says, in rows of any size and wherever it wraps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cache_strategies.sliding_window import WindowOptions
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from tests.contract.harness import World
from tests.kernels.brute_force import KEEPS

LENGTH = 110
LAYERS = (LayerSpec(1, 2, 8, 8, scale=0.4), LayerSpec(1, 2, 8, 8, scale=0.4, window=9))
TEXT = random_text(3, LENGTH, LAYERS)

Cut = Callable[[random.Random, int], int]  # (generator, max_row) -> tokens of the next row

CUTS: dict[str, Cut] = {
    "one by one": lambda rng, most: 1,
    "full rows": lambda rng, most: most,
    "rows of 7": lambda rng, most: min(7, most),
    "any rows": lambda rng, most: rng.randint(1, most),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("max_row", [6, 64])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_short_ring_equals_the_masked_definition(window: int, sinks: int, max_row: int, cut: str) -> None:
    world, name = ring(window=window, sinks=sinks, max_row=max_row)
    reading, outs, rng = world.open(name, TEXT), [], random.Random(5)
    assert slots(world) < LENGTH, "this ring must wrap"
    while reading.left:
        outs.append(step([(reading, min(reading.left, CUTS[cut](rng, max_row)))]).outs[0])
    for layer, parts in enumerate(zip(*outs, strict=True)):
        want = expected(window, sinks, layer)
        assert (torch.cat(parts).double() - want).abs().max() < 2e-6


def test_a_ring_takes_no_more_memory_than_its_window_its_sinks_and_a_row() -> None:
    world, _ = ring(window=40, sinks=4, max_row=6)
    assert slots(world) == 4 + 40 + 6 - 1


def test_a_ring_never_takes_more_than_the_longest_text_needs() -> None:
    world, _ = ring(window=500, sinks=4, max_row=64)
    assert slots(world) == world.caches["ring"].setup.geometry.max_seq_len


def test_a_row_may_be_as_long_as_the_window_unless_an_option_says_otherwise() -> None:
    for options, longest in (({"window": 40}, 40), ({"window": 40, "max_row": 6}, 6)):
        world, name = ring(sinks=0, **options)
        reading = world.open(name, TEXT)
        for start in (0, 5):
            assert reading.sequence.stop == start + longest
            step([(reading, 5)])
    world, name = ring(window=400, sinks=0)
    assert world.open(name, TEXT).sequence.stop == 160, "a step has no more tokens"


@pytest.mark.parametrize(
    ("window", "model_windows", "exact"),
    [
        (40, (None, None), False),
        (40, (30, 40), True),
        (40, (30, 41), False),
        (40, (None, 8), False),
        (160, (None,), True),
        (159, (None,), False),
    ],
)
def test_a_ring_is_exact_where_the_model_sees_no_further(
    window: int, model_windows: tuple[int | None, ...], exact: bool
) -> None:
    layers = [LayerSpec(1, 1, 8, 8, window=w) for w in model_windows]
    settings = StrategySettings(kind="sliding_window", window=window, sinks=0)
    assert World({"ring": settings}, layers=layers, max_seats=1).caches["ring"].contract.exact is exact


def test_a_ring_that_wraps_refuses_to_rewind() -> None:
    world, name = ring(window=5, sinks=0, max_row=6)
    reading = world.open(name, TEXT)
    step([(reading, 6)])
    assert reading.cache.contract.rewind == 0
    with pytest.raises(AssertionError, match="rewind"):
        reading.sequence.truncate(5)


def test_a_fork_of_a_ring_goes_its_own_way() -> None:
    world, name = ring(window=5, sinks=2, max_row=6)
    parent = world.open(name, TEXT)
    for _ in range(7):
        step([(parent, 6)])
    child_sequence = parent.sequence.fork()
    assert child_sequence is not None
    child = type(parent)(parent.cache, TEXT, child_sequence)
    step([(parent, 6)])  # the parent moves on and overwrites its own ring only
    outs = step([(child, 6)]).outs[0]
    for layer, out in enumerate(outs):
        assert (out.double() - expected(5, 2, layer)[42:48]).abs().max() < 2e-6


def ring(**options: int) -> tuple[World, str]:
    settings = StrategySettings(kind="sliding_window", **options)
    return World({"ring": settings}, layers=LAYERS, max_seats=2), "ring"


def slots(world: World) -> int:
    cache = world.caches["ring"]
    return cache.store.block_size


def expected(window: int, sinks: int, layer: int) -> Tensor:
    options = WindowOptions(window=window, sinks=sinks)
    mask = visible_keys(LAYERS[layer], LENGTH, KEEPS["sliding_window"](options))
    return attention(TEXT.q[layer], TEXT.k[layer], TEXT.v[layer], LAYERS[layer], mask)
