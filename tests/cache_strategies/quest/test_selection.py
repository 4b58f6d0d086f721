"""quest reads the blocks with the largest bounds, and its summaries bound the product of every key."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cache_strategies.base import Rows
from cache_strategies.quest.cache import QuestCache
from cache_strategies.visible import count_dropped_tokens
from kernels.types import LayerSpec
from plugin_kit.driver.steps import step
from plugin_kit.driver.texts import random_text
from tests.cache_strategies.quest.brute_force import LAYERS, check, generate, make_world, open_prompt, read_prompt
from tests.kernels.rounded_vectors import round_to_int8

HYBRID = (LAYERS[0], LayerSpec(1, 3, 4, 8, window=9), LAYERS[1], LayerSpec(4, 4, 8, 4))


# ---------------------------------------------------------------- the choice
@pytest.mark.parametrize("options", [{}, {"budget": 0.4, "min_tokens": 16}, {"block_size": 1, "budget": 7}], ids=str)
def test_generated_tokens_read_the_best_blocks(options: dict[str, object], rng: random.Random) -> None:
    world = make_world(**options)
    generate(read_prompt(world, random_text(rng.randrange(99), 110, LAYERS), rng.randint(1, 70)), 40)
    world.check_integrity()


def test_rows_of_all_kinds_in_one_step(rng: random.Random) -> None:
    """Long texts choose, short ones and chunks read everything; a layer with a window keeps that."""
    world = make_world(layers=HYBRID)
    long, longer = (read_prompt(world, random_text(i, 160, HYBRID), n) for i, n in ((1, 61), (2, 99)))
    short = read_prompt(world, random_text(3, 160, HYBRID), 9)
    prompt = open_prompt(world, random_text(4, 160, HYBRID), 120)
    for size in (50, 1, 30):
        rows = [(long, 1), (short, 1), (prompt, size), (longer, 1)]
        rng.shuffle(rows)
        check(step(rows, keys=True), [reading for reading, _ in rows])
    world.check_integrity()


# ---------------------------------------------------------------- the summaries
@pytest.mark.parametrize("format", ["model", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_summary_bounds_the_product_of_every_key_with_every_query(
    dtype: torch.dtype, format: str, rng: random.Random
) -> None:
    world = make_world(layers=HYBRID, dtype=dtype, k_dtype=format, v_dtype=format)
    text = random_text(rng.randrange(99), 90, HYBRID, dtype)
    reading = read_prompt(world, text, 80)
    step([(reading, 1)])
    cache = reading.cache
    assert isinstance(cache, QuestCache)
    num_full = 80 // 4
    for group in cache._groups:
        for layer in group.layers:
            if HYBRID[layer].window is not None:
                continue
            for head in range(group.num_heads):
                blocks = cache.table.host_tables[head, reading.sequence.index, :num_full]  # type: ignore[attr-defined]
                found = group.summaries.get(layer)[torch.from_numpy(blocks.astype(np.int64))]
                keys = text.k[layer][:80]
                stored = (round_to_int8(keys) if format == "int8" else keys)[:, head].unflatten(0, (num_full, 4))
                largest, smallest = found.chunk(2, 1)
                assert torch.equal(largest, stored.amax(1).to(found.dtype))
                assert torch.equal(smallest, stored.amin(1).to(found.dtype))
                q = torch.randn(50, keys.shape[2], dtype=torch.float64)
                bounds = q.clamp_min(0) @ largest.double().T + q.clamp_max(0) @ smallest.double().T
                products = torch.einsum("qd,bsd->qbs", q, stored.double())
                assert (products <= bounds[..., None] + 1e-12).all()


def test_a_longer_text_than_the_budget_reads_less_and_says_so() -> None:
    world = make_world()
    reading = read_prompt(world, random_text(1, 60, LAYERS), 19)
    dropped = []
    for _ in range(30):
        dropped.append(count_dropped_tokens(reading.cache, reading.sequence.length))
        keys = step([(reading, 1)], keys=True).keys[0]
        assert all(len(positions) == reading.sequence.length - dropped[-1] for _, _, positions in keys)
    assert dropped == [max(0, (19 + i) // 4 + 1 - 5) * 4 for i in range(30)]


def test_prefill_and_short_texts_leave_all_layers_to_the_kernels() -> None:
    world = make_world()
    reading = open_prompt(world, random_text(1, 60, LAYERS), 40)
    for size, hooked in ((12, False), (1, False), (30, False), (1, True)):
        assert reading.sequence.reserve(size)
        locations = reading.cache.locate(Rows([reading.sequence], [size])).by_layer
        assert [each is None for each in locations] == [hooked] * len(LAYERS)
        step([(reading, size)])
