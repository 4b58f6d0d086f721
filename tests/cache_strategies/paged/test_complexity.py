"""The cost of open, commit, close and eviction depends on the blocks concerned, not on the number of all blocks."""

from __future__ import annotations

import pytest

from cache_strategies.eviction import list_policies
from cache_strategies.paged.cache import PagedCache
from cache_strategies.types import Text
from tests.cache_strategies.cache_driver import count_free_blocks, enter, evict, make_cache, read_prompt
from tools.bench.counts import count_calls

FEW = 2_000
MANY = [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
TEXT = list(range(10, 42))  # eight blocks of 4


def full(blocks: int, policy: str) -> PagedCache:
    """Return a cache whose memory is full of idle blocks."""
    cache = make_cache("paged", blocks=blocks, block_size=4, eviction=policy)
    assert isinstance(cache, PagedCache)
    for n in range(blocks):
        block = cache.pool.allocate()
        assert block is not None
        name = cache.hasher.hash_block_tokens(cache.hasher.root_hash(""), [n, n, n, n])
        assert name is not None
        cache.pool.publish(name, block)
        cache.pool.decref(block, ttl=float("inf"))
    assert count_free_blocks(cache) == 0
    return cache


def costs(cache: PagedCache) -> dict[str, int]:
    """Return the number of Python calls of each operation, on a cache full of idle blocks."""
    sequence = read_prompt(cache, TEXT)  # evicts, and leaves its blocks as the latest
    sequence.close()
    found: dict[str, int] = {}

    def opened() -> None:
        nonlocal sequence
        sequence = cache.open(Text([*TEXT, *range(50, 60)]))  # type: ignore[assignment]

    found["open"] = count_calls(opened)
    found["step"] = count_calls(lambda: enter(cache, (sequence, list(range(50, 60)))))
    found["close"] = count_calls(lambda: sequence.close())
    found["evict"] = count_calls(lambda: evict(cache, 5))
    found["open again"] = count_calls(lambda: cache.open(Text(TEXT)))
    return found


@pytest.mark.parametrize("blocks", MANY)
@pytest.mark.parametrize("policy", sorted(list_policies()))
def test_many_blocks_cost_no_more_than_a_few(policy: str, blocks: int) -> None:
    few, many = costs(full(FEW, policy)), costs(full(blocks, policy))
    assert few == many
    assert max(few.values()) < 2_000
