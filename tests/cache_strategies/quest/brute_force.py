"""Which blocks quest may read, by its definition in float64, from a text's own keys and queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies.quest.cache import QuestCache
from cache_strategies.types import Text as CachedText
from config.settings import StrategySettings
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention
from plugin_kit.driver.steps import Reading, StepOutputs, step
from plugin_kit.driver.texts import RandomText
from plugin_kit.driver.visible import check_keys
from tests.contract.harness import World

TIES = 1e-5  # bounds closer than this, relative to the largest, may be taken for equal
LAYERS = (LayerSpec(2, 6, 8, 4, scale=0.3), LayerSpec(2, 2, 8, 4, scale=0.3, softcap=5.0))


def make_world(
    *,
    layers: Sequence[LayerSpec] = LAYERS,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int | None = None,
    **options: object,
) -> World:
    """Return a world with the instance "quest", which reads 5 blocks of 4 tokens, and more with other options."""
    settings = StrategySettings.model_validate({"kind": "quest", "block_size": 4, "budget": 20, **options})
    return World({"quest": settings}, layers=layers, dtype=dtype, max_seats=4, memory_bytes=memory_bytes)


def open_prompt(world: World, text: RandomText, length: int, *, max_cached: int | None = None) -> Reading:
    """Open a sequence for a prompt, the first `length` tokens of a text; what follows is generated."""
    cache = world.caches["quest"]
    sequence = cache.open(CachedText(text.ids[:length], max_cached=max_cached))
    assert sequence is not None, "no room"
    return Reading(cache, text, sequence)


def read_prompt(world: World, text: RandomText, length: int, *, max_cached: int | None = None) -> Reading:
    """Open a sequence for a prompt and compute what of it was not found, in one row."""
    reading = open_prompt(world, text, length, max_cached=max_cached)
    if length - reading.sequence.length:
        step([(reading, length - reading.sequence.length)])
    return reading


def generate(reading: Reading, count: int) -> None:
    """Enter tokens one by one, and compare each with the definition."""
    for _ in range(count):
        check(step([(reading, 1)], keys=True), [reading])


def check(result: StepOutputs, readings: Sequence[Reading]) -> None:
    """Check a step in which each of these texts had one row, of one token or of several."""
    for i, (reading, start) in enumerate(zip(readings, result.starts, strict=True)):
        text, cache = reading.text, reading.cache
        assert isinstance(cache, QuestCache)
        for layer, spec in enumerate(cache.setup.geometry.layers):
            out = result.outs[i][layer]
            end = start + len(out)
            k, v = text.k[layer][:end], text.v[layer][:end]
            listed = check_keys(k, v, result.keys[i][layer])  # [H, end]
            if len(out) == 1 and spec.window is None:
                check_blocks(text, layer, spec, listed, cache)
            want = attention(text.q[layer][end - 1 : end], k, v, spec, listed[:, None])
            assert (out[-1:].double() - want).abs().max() < 1e-5


def check_blocks(text: RandomText, layer: int, spec: LayerSpec, listed: Tensor, cache: QuestCache) -> None:
    """Check that a query, at the last position of `listed` [H, end], has read the blocks of the largest bounds."""
    size, end = cache.block_size, listed.shape[1]
    num_blocks = -(-end // size)
    num_read = cache.options.count_read(num_blocks, size)
    for head, seen in enumerate(listed):
        blocks = seen.split(size)
        read = {i for i, part in enumerate(blocks) if part.any()}
        assert all(part.all() for i, part in enumerate(blocks) if i in read), "a part of a block was read"
        assert len(read) == num_read
        assert {0, num_blocks - 2, num_blocks - 1} <= read or num_read == num_blocks
        others = set(range(1, num_blocks - 2)) - read
        if others:
            bounds = bound(text, layer, spec, head, end - 1, size)
            tolerance = TIES * max(map(abs, bounds))
            chosen = [bounds[i] for i in read if 1 <= i < num_blocks - 2]
            assert min(chosen) >= max(bounds[i] for i in others) - tolerance, "a better block was not read"


def bound(text: RandomText, layer: int, spec: LayerSpec, head: int, position: int, size: int) -> list[float]:
    """Return for each full block the largest possible product of its keys' range with a query of a KV head's group."""
    group = spec.num_q_heads // spec.num_kv_heads
    queries = text.q[layer][position, head * group : (head + 1) * group].double()
    bounds = []
    for block in text.k[layer][: position // size * size, head].double().split(size):
        corners = torch.maximum(queries * block.amax(0), queries * block.amin(0))
        bounds.append(float(corners.sum(1).max()))
    return bounds
