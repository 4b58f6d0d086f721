"""A request gets the same bits in a batch of all strategies as alone, while others enter and leave.

Its rows are the same: only then do strategies promise it whose attention depends on rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from config.settings import StrategySettings
from plugin_kit.driver.steps import Reading, step
from plugin_kit.driver.texts import MODEL, RandomText, random_text
from tests.contract.harness import World

pytestmark = pytest.mark.every_backend

EVERY = 9  # tokens from one boundary of `compressed` and `streaming` to the next, at which rows end

STRATEGIES = {
    "compressed": StrategySettings(kind="compressed", budget=14, every=EVERY, recent=3, scorer="tova"),
    "compressed_by_head": StrategySettings(kind="compressed", budget=0.4, every=EVERY, recent=3, by_head=True),
    "contiguous": StrategySettings(kind="contiguous"),
    "hooked": StrategySettings(kind="hooked"),
    "hooked_everywhere": StrategySettings(kind="hooked", layers="all"),
    "mirrored": StrategySettings(kind="mirrored"),
    "paged": StrategySettings(kind="paged", block_size=7, prefix_cache=False),
    "quest": StrategySettings(kind="quest", block_size=4, budget=16),
    "quest_by_share": StrategySettings(kind="quest", block_size=3, budget=0.4, min_tokens=12, prefix_cache=False),
    "random_drop": StrategySettings(kind="random_drop"),
    "random_drop_by_head": StrategySettings(kind="random_drop_by_head", every=13),
    "residual": StrategySettings(kind="residual", residual_length=12, max_row=40, block_size=8, prefix_cache=False),
    "sliding_window": StrategySettings(kind="sliding_window", window=20, sinks=3, max_row=40),
    "streaming": StrategySettings(kind="streaming", window=12, sinks=2, every=EVERY),
}


class Sized(NamedTuple):
    """A text under an instance, and the sizes of its rows: a prompt in pieces, then single tokens."""

    name: str
    text: RandomText
    sizes: list[int]


def draw_texts(rng: random.Random, dtype: torch.dtype) -> list[Sized]:
    """Return two texts for each instance, with prompts cut at random."""
    texts = []
    for seed, name in enumerate(sorted(STRATEGIES) * 2):
        sizes = [min(rng.randint(1, rng.choice([7, 60])), 40) for _ in range(rng.randint(1, 3))]
        sizes += [1] * rng.randint(0, 8)
        if STRATEGIES[name].kind in ("compressed", "streaming"):
            sizes = split_at_boundaries(sizes)
        texts.append(Sized(name, random_text(seed, sum(sizes), MODEL, dtype), sizes))
    return texts


def split_at_boundaries(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of rows that end at these rows' ends, and at every multiple of EVERY."""
    ends = {*accumulate(sizes), *range(EVERY, sum(sizes), EVERY)}
    return [end - begin for begin, end in pairwise([0, *sorted(ends)])]


def read_alone(each: Sized, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the outputs of each row by layer, with no other sequence in the cache."""
    world = World({each.name: STRATEGIES[each.name]}, dtype=dtype, max_seats=1)
    reading = world.open(each.name, each.text)
    return [step([(reading, n)]).outs[0] for n in each.sizes]


def read_together(texts: Sequence[Sized], dtype: torch.dtype, rng: random.Random) -> list[list[list[Tensor]]]:
    """Return the same for all texts, read in the same batches; each enters at a random step, and leaves at its end."""
    world = World(STRATEGIES, dtype=dtype, max_seats=2)
    outs: list[list[list[Tensor]]] = [[] for _ in texts]
    waiting, running = list(range(len(texts))), dict[int, Reading]()
    rng.shuffle(waiting)
    while waiting or running:
        while waiting and rng.random() < 0.6:
            i = waiting.pop()
            running[i] = world.open(texts[i].name, texts[i].text)
        chosen = [i for i in running if rng.random() < 0.8]
        rng.shuffle(chosen)
        if not chosen:
            continue
        result = step([(running[i], texts[i].sizes[len(outs[i])]) for i in chosen])
        for i, out in zip(chosen, result.outs, strict=True):
            outs[i].append(out)
            if len(outs[i]) == len(texts[i].sizes):
                reading = running.pop(i)
                reading.sequence.close()
        world.check_integrity()
    return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_text_has_the_same_bits_alone_and_beside_all_other_strategies(dtype: torch.dtype) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = draw_texts(rng, dtype)
    for each, found in zip(texts, read_together(texts, dtype, rng), strict=True):
        for row, (ours, theirs) in enumerate(zip(found, read_alone(each, dtype), strict=True)):
            for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a, b), f"{each.name}, rows {each.sizes}: row {row} differs in layer {layer}"
