"""thinned, the example of a strategy that drops tokens in compact(), keeps the tokens of its definition."""

from __future__ import annotations

import random

import pytest

from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from plugin_kit.driver.world import World
from tests.contract import harness

LAYERS = (LayerSpec(2, 4, 16, 16), LayerSpec(1, 3, 8, 8, window=24))
LENGTH = 150


@pytest.mark.fuzz
def test_what_is_kept_follows_from_the_definition() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    recent, group, every = rng.randint(1, 30), rng.randint(1, 9), rng.randint(1, 40)
    settings = StrategySettings(
        kind="tests.contract.kinds.thinned:ThinnedCache", recent=recent, group=group, every=every
    )
    world = World({"thinned": settings}, harness.make_ops(), layers=LAYERS, max_seats=1)
    reading = world.open("thinned", random_text(1, LENGTH, LAYERS))
    while reading.left:
        boundary = reading.sequence.length // every * every
        kept = [p for p in range(boundary) if p >= boundary - recent or p // group % 2 == 0]
        n = reading.chunk(rng.choice([1, 5, 40]))
        assert reading.sequence.length + n <= boundary + every, "a row crosses a boundary"
        end = reading.sequence.length + n
        result = step([(reading, n)], keys=True)
        wanted = [*kept, *range(boundary, end)]
        assert result.keys[0][0][2].tolist() == wanted
        assert result.keys[0][1][2].tolist() == [p for p in wanted if p >= end - 24]
        world.check_integrity()
    boundary = LENGTH // every * every
    kept = [p for p in range(boundary) if p >= boundary - recent or p // group % 2 == 0]
    store = world.caches["thinned"].stores[0]
    num_held = len(kept) + LENGTH - boundary
    assert world.caches["thinned"].usage().used == num_held * store.block_bytes // store.block_size
