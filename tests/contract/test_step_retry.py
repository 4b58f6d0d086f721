"""Only commit changes state: a step of many strategies, or with copies pending, is repeated bit for bit.

That of one strategy is one of the promises of every strategy.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from cache_strategies import registry
from config.settings import StrategySettings
from plugin_kit.driver.failing_ops import FailingOps
from plugin_kit.driver.steps import Reading, attend, step
from plugin_kit.driver.texts import MODEL, random_text, spliced
from server.engine.batch import Batch
from tests.contract import harness
from tests.contract.harness import World, every_instance
from tests.contract.kinds import KINDS

pytestmark = pytest.mark.every_backend

LAYERS = (*MODEL, *MODEL)
STRATEGIES = every_instance()
KNOWN = {  # they use the operations
    name: each for name, each in STRATEGIES.items() if each.kind in registry.BUILTIN or each.kind in KINDS
}


def step_after_failure(ops: FailingOps, rows: list[tuple[Reading, int]], calls: int) -> list[list[Tensor]]:
    """Run a step that fails after `calls` calls of attend, then repeat it successfully."""
    work = [reading.work(n) for reading, n in rows]
    ops.calls = calls
    with pytest.raises(RuntimeError, match="injected"):
        attend(Batch(work), rows)
    batch = Batch(work)
    outs = attend(batch, rows).outs
    batch.commit()
    return outs


# ---------------------------------------------------------------- a failed step
def test_a_mixed_step_is_repeated_bit_for_bit_whichever_strategy_failed() -> None:
    ops = FailingOps(harness.make_ops())
    texts = {name: random_text(i, 50, LAYERS) for i, name in enumerate(KNOWN)}
    worlds = [World(KNOWN, layers=LAYERS, max_seats=1, ops=each) for each in (None, ops)]
    clean, failing = ([world.open(name, texts[name]) for name in KNOWN] for world in worlds)
    rng = random.Random(2)
    while any(reading.left for reading in clean):
        sizes = [reading.chunk(rng.choice([1, 9, 30])) for reading in clean]
        live = [i for i, n in enumerate(sizes) if n]
        want = step([(clean[i], sizes[i]) for i in live]).outs
        calls = rng.randrange(len(live) * len(LAYERS))
        got = step_after_failure(ops, [(failing[i], sizes[i]) for i in live], calls)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    worlds[1].check_integrity()


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_a_step_with_a_copy_on_write_pending_is_repeated_bit_for_bit(layer: int) -> None:
    ops = FailingOps(harness.make_ops())
    settings = {"paged": StrategySettings(kind="paged", block_size=16)}
    worlds = [World(settings, layers=LAYERS, max_seats=3, ops=each) for each in (None, ops)]
    (clean, failing) = (forked(world) for world in worlds)
    want = step([(reading, 3) for reading in clean]).outs
    got = step_after_failure(ops, [(reading, 3) for reading in failing], calls=layer)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    for a, b in zip(step([(r, 5) for r in failing]).outs, step([(r, 5) for r in clean]).outs, strict=True):
        assert_same(a, b)
    worlds[1].check_integrity()


def forked(world: World) -> list[Reading]:
    """Return three sequences of a text of 24 tokens that continue differently: two must copy their shared block."""
    common = random_text(0, 44, LAYERS)
    texts = [spliced(common, random_text(seed, 44, LAYERS), 24) for seed in (1, 2, 3)]
    parent = world.open("paged", common.head(24))
    step([(parent, 24)])
    cache = parent.cache
    sequences = [parent.sequence, parent.sequence.fork(), parent.sequence.fork()]
    assert all(sequences)
    return [Reading(cache, text, sequence) for text, sequence in zip(texts, sequences, strict=True) if sequence]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b), f"differs by {(a - b).abs().max()}"
