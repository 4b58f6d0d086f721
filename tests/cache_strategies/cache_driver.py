"""Drives a cache of tiny layers, whose keys hold token and position; one call runs an engine's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.block_table import BlockTableCache, TableSequence
from cache_strategies.contiguous import ContiguousCache
from cache_strategies.features import Gathering, SelfChecking
from cache_strategies.memory import make_memory
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.spaces import find_space
from cache_strategies.types import NO_SALT, Geometry, Salt, Text, count_reusable_tokens
from config.settings import StrategySettings
from kernels.types import LayerSpec
from server.engine.instance import Instance
from tests.kernels.backend_matrix import BACKENDS, FASTEST

LAYER = LayerSpec(1, 1, 4, 4)
BLOCK = 4  # tokens of a block, unless a test says otherwise


def make_cache(
    kind: str,
    *,
    blocks: int = 200,
    seats: int = 8,
    max_seq_len: int = 64,
    layers: Sequence[LayerSpec] = (LAYER,),
    **options: int | bool | str,
) -> Any:
    """Return an instance called "it", alone in its memory; what was never written is NaN.

    The memory has room for `blocks` blocks of the instance's first region.
    """
    (instance,) = registry.resolve_instances({"it": StrategySettings(kind=kind, **options)})
    geometry = Geometry(layers, torch.float32, seats, max_seq_len, 64)
    size = find_space("cpu").round_block(instance.cls.sizes(instance.options, geometry).block_bytes[0])
    memory = make_memory(blocks * size)
    cache = registry.build_caches([instance], geometry, memory, BACKENDS[FASTEST]())["it"]
    for region in memory.list_regions("it"):
        region.memory.fill_(0xFF)
    return cache


def make_paged(
    *,
    blocks: int = 200,
    seats: int = 8,
    block_size: int = BLOCK,
    layers: Sequence[LayerSpec] = (LAYER,),
    **options: bool,
) -> PagedCache:
    """Return a paged instance; if some layers have a window, `blocks` are those of the layers without one."""
    cache = make_cache("paged", blocks=blocks, seats=seats, block_size=block_size, layers=layers, **options)
    assert isinstance(cache, PagedCache)
    return cache


def count_bytes(cache: KVCache[Any], num_tokens: int) -> int:
    """Return the most bytes that a sequence of `num_tokens` tokens holds at one time, as sizes() says."""
    return cache.setup.memory.shared.count_sequence_bytes(cache.name, num_tokens)


def get_block_bytes(cache: KVCache[Any]) -> int:
    """Return the bytes that a block of a cache's first region takes."""
    return cache.setup.memory.regions[0].size


def get_token_bytes(cache: KVCache[Any]) -> float:
    """Return the bytes of a token's keys and values."""
    return sum(store.block_bytes / store.block_size for store in cache.stores)


def count_held_blocks(cache: KVCache[Any]) -> int:
    """Return the number of blocks that a cache holds in all its regions."""
    return sum(region.num_held for region in cache.setup.memory.regions)


def count_free_blocks(cache: KVCache[Any]) -> int:
    """Return how many blocks of a cache's first region fit into the memory that nothing holds."""
    return cache.setup.memory.shared.free_bytes // cache.setup.memory.regions[0].size


def evict(cache: KVCache[Any], blocks: int) -> int:
    """Free idle memory of at least so many blocks of a cache's first region; return how many were freed."""
    size = cache.setup.memory.regions[0].size
    return cache.evict(blocks * size) // size


def open_sequence(
    cache: KVCache[Any],
    tokens: Sequence[int],
    *,
    salt: Salt = NO_SALT,
    max_cached: int | None = None,
    priority: int = 0,
    ttl: float | None = None,
) -> PagedSequence:
    """Open a sequence; there must be room for it."""
    sequence: PagedSequence | None = cache.open(Text(tokens, salt, max_cached, priority, ttl))
    assert sequence is not None, "no room"
    return sequence


def find_cached(
    cache: KVCache[Any] | Instance, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
) -> int:
    """Return how many tokens of a prompt open() would find cached now, by its own look-up; change nothing."""
    inner = cache.strategy if isinstance(cache, Instance) else cache
    if isinstance(inner, ContiguousCache):
        return inner._find_reusable_block(Text(tokens, salt, max_cached))[1]
    if isinstance(inner, PagedCache):
        limit = count_reusable_tokens(tokens, max_cached)
        return inner._find_prefix(inner._hash_blocks(tokens, salt), limit)[0] * inner.block_size
    return 0


def enter(cache: KVCache[Any], *rows: tuple[KVSequence, Sequence[int]]) -> None:
    """Run one step that appends these tokens to the sequences."""
    cache.poll()
    for sequence, tokens in rows:
        assert sequence.reserve(len(tokens)), "no room"
    write(cache, *rows)


def write(cache: KVCache[Any], *rows: tuple[KVSequence, Sequence[int]], commit: bool = True) -> None:
    """Locate, write keys and values and, unless `commit` is False, commit: a step without reserve()."""
    rows = tuple(sorted(rows, key=lambda row: len(row[1]) > 1))
    located = Rows([sequence for sequence, _ in rows], [len(tokens) for _, tokens in rows])
    locations = cache.locate(located).by_layer
    entries = torch.cat([_entry(sequence.length, tokens) for sequence, tokens in rows])
    for layer, spec in enumerate(cache.setup.geometry.layers):
        q, k = (entries.repeat(1, heads, 1) for heads in (spec.num_q_heads, spec.num_kv_heads))
        if (location := locations[layer]) is None:
            cache.attend(layer, located, q, k, -k, torch.empty_like(q))
            continue
        ops, window = cache.setup.ops, location.window
        ops.write_kv(location.store, layer, k, -k, location.at)
        ops.attend(torch.empty_like(q), q, location.store, layer, location.at, spec, window=window)
    if commit:
        for sequence, tokens in rows:
            sequence.commit(tokens)


def _entry(start: int, tokens: Sequence[int]) -> Tensor:
    """Return keys [n, 1, 4] of tokens: the id, the position, zeros."""
    k = torch.zeros(len(tokens), 1, 4)
    k[:, 0, 0] = torch.tensor(tokens)
    k[:, 0, 1] = torch.arange(start, start + len(tokens))
    return k


def read_prompt(cache: KVCache[Any], tokens: Sequence[int], **options: Any) -> PagedSequence:
    """Open a sequence for a prompt, with options of `open_sequence`, and prefill it in one step."""
    sequence = open_sequence(cache, tokens, **options)
    enter(cache, (sequence, tokens[sequence.length :]))
    return sequence


def stored_tokens(cache: KVCache[Any], sequence: KVSequence) -> list[int]:
    """Return the tokens whose keys and values are in a sequence's memory; for strategies that keep all of them."""
    assert isinstance(cache, BlockTableCache)
    assert isinstance(sequence, TableSequence)
    size, tokens = cache.store.block_size, []
    for position in range(sequence.length):
        block, slot = sequence.blocks[position // size], position % size
        k, v = cache.store.k(0)[block, 0, slot], cache.store.v(0)[block, 0, slot]
        assert torch.equal(k, -v)
        assert k[1] == position
        tokens.append(int(k[0]))
    return tokens


def visible_tokens(cache: KVCache[Any], sequence: KVSequence, layer: int) -> list[int]:
    """Return the tokens that a sequence's next token sees in a layer, without itself; their positions are checked.

    The row is located and not committed.
    """
    assert sequence.reserve(1)
    assert isinstance(cache, Gathering)
    rows = Rows([sequence], [1])
    cache.locate(rows)
    k, v, positions = cache.gather(layer, rows, 0)
    assert torch.equal(k[:-1], -v[:-1])
    assert (
        k[:-1, 0, 1].tolist() == positions[:-1].tolist() == list(range(sequence.length - len(k) + 1, sequence.length))
    )
    return [int(token) for token in k[:-1, 0, 0]]


def assert_nothing_leaked(cache: KVCache[Any]) -> None:
    """Assert that all memory is free once idle blocks are evicted, when no sequence is open."""
    memory = cache.setup.memory.shared
    assert isinstance(cache, SelfChecking)
    cache.check_integrity()
    cache.evict(memory.total_bytes)
    cache.check_integrity()
    memory.check_integrity()
    assert not memory.held_bytes
