"""Drives a cache of tiny layers, whose keys hold token and position; one call runs an engine's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import KVCache, Row, Seat
from cache_strategies.block_table import BlockTableCache, TableSeat
from cache_strategies.contiguous import ContiguousCache
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
    pages: int = 200,
    seats: int = 8,
    max_seq_len: int = 64,
    layers: Sequence[LayerSpec] = (LAYER,),
    **options: int | bool,
) -> KVCache:
    """Return an instance called "it", alone in its arena; memory that was never written is NaN."""
    instances = registry.resolve_instances({"it": StrategySettings(kind=kind, **options)})
    geometry = Geometry(layers, torch.float32, seats, max_seq_len, 64)
    arena = Arena(pages, registry.page_bytes(instances, geometry))
    arena.memory.fill_(0xFF)
    return registry.build_caches(instances, geometry, arena, BACKENDS[FASTEST]())["it"]


def make_paged(
    *,
    pages: int = 200,
    seats: int = 8,
    block_size: int = BLOCK,
    layers: Sequence[LayerSpec] = (LAYER,),
    **options: bool,
) -> PagedCache:
    """Return a paged instance; one page is one block, or a part of it if some of the layers have a window."""
    cache = make_cache("paged", pages=pages, seats=seats, block_size=block_size, layers=layers, **options)
    assert isinstance(cache, PagedCache)
    return cache


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
    k = torch.cat([_entry(seat.length, tokens) for seat, tokens in rows])
    for layer in range(len(cache.setup.geometry.layers)):
        cache.attend(plan, layer, k, k, -k, torch.empty_like(k))
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
    """Assert that the arena is free once idle blocks are reclaimed, when no seat is open."""
    cache.check_integrity()
    arena = cache.setup.arena
    cache.reclaim(arena.pages)
    cache.check_integrity()
    assert arena.num_free_pages == arena.pages
