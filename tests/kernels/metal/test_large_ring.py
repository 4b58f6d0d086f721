"""The ring of `sliding_window` with the geometry of a large model, launched by the strategy; takes a minute or more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.block_table import BlockTableCache
from cache_strategies.memory import make_memory
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Text
from config.settings import StrategySettings
from kernels.metal.backend import MetalOps
from kernels.metal.runtime import load_emulated
from kernels.types import LayerSpec
from plugin_kit.driver.reference import attention, visible_keys
from server.engine.batch import attend_at

PHI4 = LayerSpec(10, 40, 128, 128, scale=128**-0.5)  # each of its 40 layers
LAYERS, WINDOW, SINKS, CHUNK = 40, 4096, 4, 512


@pytest.mark.slow
def test_a_ring_of_phi_4_attends_as_the_definition_says() -> None:
    """In float32, over 4096 tokens and the sinks: a chunk and a token, after a ring of 1.9 GB has wrapped around."""
    ops = load_emulated()
    cache = _cache(ops)
    past, chunk = WINDOW + CHUNK + 100, 5  # the ring has 4607 slots
    length = past + chunk + 1
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(length + LAYERS, PHI4.num_kv_heads, 128, generator=generator) for _ in range(2))
    q = torch.randn(length + LAYERS, PHI4.num_q_heads, 128, generator=generator)
    sequence = cache.open(Text(range(length)))
    assert sequence is not None
    for start in range(0, past, CHUNK):
        _step(cache, sequence, min(CHUNK, past - start), k, v)
    mask = visible_keys(PHI4, length, lambda i, j: (i - j < WINDOW) | (j < SINKS), first=past)
    for n, queries in ((chunk, slice(0, chunk)), (1, slice(chunk, None))):
        outs = _step(cache, sequence, n, k, v, q)
        for layer, out in enumerate(outs):
            here = slice(layer, layer + length)  # each layer has other numbers at a position
            want = attention(q[here][past:][queries], k[here], v[here], PHI4, mask[queries])
            assert (out.double() - want).abs().max() < 1e-5, f"layer {layer}"


def _cache(ops: MetalOps) -> KVCache:
    geometry = Geometry([PHI4] * LAYERS, torch.float32, max_seats=1, max_seq_len=16_384, max_num_batched_tokens=CHUNK)
    options = {"kind": "sliding_window", "window": WINDOW, "sinks": SINKS}
    instances = registry.resolve_instances({"ring": StrategySettings.model_validate(options)})
    memory = make_memory(registry.compute_sequence_bytes(instances, geometry, find_space("cpu").round_block))
    caches = registry.build_caches(instances, geometry, memory, ops)
    cache = caches["ring"]
    assert isinstance(cache, BlockTableCache)
    assert cache.ring == WINDOW + CHUNK - 1
    return cache


def _step(cache: KVCache, sequence: KVSequence, n: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> list[Tensor]:
    """Write the next n tokens in all layers; return the output of each layer for the queries, if any."""
    start, outs = sequence.length, []
    assert sequence.reserve(n)
    location = cache.locate(Rows([sequence], [n])).by_layer[0]
    assert location is not None
    for layer in range(LAYERS):
        here = slice(layer + start, layer + start + n)
        if q is None:
            cache.setup.ops.write_kv(location.store, layer, k[here], v[here], location.at)
        else:
            outs.append(torch.full((n, PHI4.num_q_heads, 128), torch.nan))
            attend_at(cache.setup, location, None, layer, q[here], k[here], v[here], outs[-1])
    sequence.commit(range(n))
    return outs
