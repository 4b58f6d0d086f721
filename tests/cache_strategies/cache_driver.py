"""Drives a cache of tiny layers, whose keys hold token and position; one call runs an engine's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.base import KVCache, Row, Seat
from cache_strategies.block_table import BlockTableCache, TableSeat
from cache_strategies.contiguous import ContiguousCache
from cache_strategies.memory import find_space, make_memory
from cache_strategies.paged.cache import PagedCache
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.types import NO_SALT, Geometry, Salt, count_reusable_tokens
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
    **options: int | bool,
) -> KVCache:
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


def count_bytes(cache: KVCache, num_tokens: int) -> int:
    """Return the most bytes that a sequence of `num_tokens` tokens holds at one time, as sizes() says."""
    return cache.setup.memory.shared.count_sequence_bytes(cache.name, num_tokens)


def get_block_bytes(cache: KVCache) -> int:
    """Return the bytes that a block of a cache's first region takes."""
    return cache.setup.memory.regions[0].size


def get_token_bytes(cache: KVCache) -> float:
    """Return the bytes of a token's keys and values."""
    return sum(store.block_bytes / store.block_size for store in cache.stores)


def count_held_blocks(cache: KVCache) -> int:
    """Return the number of blocks that a cache holds in all its regions."""
    return sum(region.num_held for region in cache.setup.memory.regions)


def count_free_blocks(cache: KVCache) -> int:
    """Return how many blocks of a cache's first region fit into the memory that nothing holds."""
    return cache.setup.memory.shared.free_bytes // cache.setup.memory.regions[0].size


def evict(cache: KVCache, blocks: int) -> int:
    """Free idle memory of at least so many blocks of a cache's first region; return how many were freed."""
    size = cache.setup.memory.regions[0].size
    return cache.evict(blocks * size) // size


def open_seat(
    cache: KVCache, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
) -> PagedSeat:
    """Open a seat; there must be room for it."""
    seat = cache.open(tokens, salt=salt, max_cached=max_cached)
    assert seat is not None, "no room"
    return seat  # type: ignore[return-value]


def find_cached(
    cache: KVCache | Instance, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
) -> int:
    """Return how many tokens of a prompt open() would find cached now, by its own look-up; change nothing."""
    inner = cache.strategy if isinstance(cache, Instance) else cache
    if isinstance(inner, ContiguousCache):
        return inner._find_reusable_block(tokens, salt, max_cached)[1]
    if isinstance(inner, PagedCache):
        limit = count_reusable_tokens(tokens, max_cached)
        return inner._find_prefix(inner._hash_blocks(tokens, salt), limit)[0] * inner.block_size
    return 0


def enter(cache: KVCache, *rows: tuple[Seat, Sequence[int]]) -> None:
    """Run one step that appends these tokens to the seats."""
    cache.poll()
    for seat, tokens in rows:
        assert cache.grow(seat, len(tokens)), "no room"
    write(cache, *rows)


def write(cache: KVCache, *rows: tuple[Seat, Sequence[int]], commit: bool = True) -> None:
    """Plan, write keys and values and, unless `commit` is False, commit: a step without growing the seats."""
    rows = tuple(sorted(rows, key=lambda row: len(row[1]) > 1))
    plan = cache.plan([Row(seat, len(tokens)) for seat, tokens in rows])
    entries = torch.cat([_entry(seat.length, tokens) for seat, tokens in rows])
    for layer, spec in enumerate(cache.setup.geometry.layers):
        q, k = (entries.repeat(1, heads, 1) for heads in (spec.num_q_heads, spec.num_kv_heads))
        cache.attend(plan, layer, q, k, -k, torch.empty_like(q))
    if commit:
        cache.commit(plan, [tokens for _, tokens in rows])


def _entry(start: int, tokens: Sequence[int]) -> Tensor:
    """Return keys [n, 1, 4] of tokens: the id, the position, zeros."""
    k = torch.zeros(len(tokens), 1, 4)
    k[:, 0, 0] = torch.tensor(tokens)
    k[:, 0, 1] = torch.arange(start, start + len(tokens))
    return k


def read_prompt(
    cache: KVCache, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None
) -> PagedSeat:
    """Open a seat for a prompt and prefill it in one step."""
    seat = open_seat(cache, tokens, salt=salt, max_cached=max_cached)
    enter(cache, (seat, tokens[seat.length :]))
    return seat


def stored_tokens(cache: KVCache, seat: Seat) -> list[int]:
    """Return the tokens whose keys and values are in the memory of a seat; for strategies that keep all of them."""
    assert isinstance(cache, BlockTableCache)
    assert isinstance(seat, TableSeat)
    size, tokens = cache.store.block_size, []
    for position in range(seat.length):
        block, slot = seat.blocks[position // size], position % size
        k, v = cache.store.k(0)[block, 0, slot], cache.store.v(0)[block, 0, slot]
        assert torch.equal(k, -v)
        assert k[1] == position
        tokens.append(int(k[0]))
    return tokens


def visible_tokens(cache: KVCache, seat: Seat, layer: int) -> list[int]:
    """Return the tokens that the seat's next token sees in a layer, itself not included; their positions are checked.

    The step is planned and not committed.
    """
    assert cache.grow(seat, 1)
    k, v, positions = cache.plan([Row(seat, 1)]).gather_kv(layer, 0)
    assert torch.equal(k[:-1], -v[:-1])
    assert k[:-1, 0, 1].tolist() == positions[:-1].tolist() == list(range(seat.length - len(k) + 1, seat.length))
    return [int(token) for token in k[:-1, 0, 0]]


def assert_nothing_leaked(cache: KVCache) -> None:
    """Assert that all memory is free once idle blocks are evicted, when no seat is open."""
    memory = cache.setup.memory.shared
    cache.check_integrity()
    cache.evict(memory.total_bytes)
    cache.check_integrity()
    memory.check_integrity()
    assert not memory.held_bytes
