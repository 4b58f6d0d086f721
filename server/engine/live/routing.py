"""Describes an engine for routers that choose between several: its cached blocks, its memory and its queue.

Has neither texts nor token ids, but the names of cached blocks (config/block_hashes.py). It is computed only if a
router asks for it.
"""

from __future__ import annotations

from array import array
from typing import Any

from cache_strategies.features import BlockNames
from cache_strategies.types import BlockNaming
from config.block_hashes import NAME_TYPE
from server.engine.core import Core
from server.engine.isolation.guard import GuardedCache
from server.engine.isolation.results import to_block_names, to_block_naming

MAX_NAMES = 1 << 17  # most names of an instance's blocks in a description, which takes 4 bytes for each


def find_block_naming(cache: GuardedCache) -> BlockNaming | None:
    """Return what the names of an instance's blocks are made of; None if it has none, or after a fault."""
    if cache.is_suspended or not isinstance(cache.inner, BlockNames):
        return None
    naming: BlockNaming | None = cache.call_quietly("block_naming", None, convert=to_block_naming)
    return naming


def describe_routing(core: Core) -> dict[str, Any]:
    """Return what `server.cluster.router` reads of a replica: its instances, and the work that waits."""
    requests = [*core.scheduler.running, *core.scheduler.waiting]
    queued_tokens = sum(
        max(0, request.num_prompt_tokens - (0 if request.seat is None else request.seat.length)) for request in requests
    )
    return {
        "instances": {
            name: _describe_instance(core, cache)
            for name, cache in core.isolation.caches.items()
            if name not in core.isolation.quarantined
        },
        "queued_tokens": queued_tokens,
        "num_requests": len(requests),
        "kv_usage": core.arena.usage,
    }


def _describe_instance(core: Core, cache: GuardedCache) -> dict[str, Any]:
    longest, available = cache.setup.geometry.max_seq_len, core.arena.count_available_pages(cache.name)
    names: array[int] = array(NAME_TYPE)
    shares = find_block_naming(cache) is not None
    if shares:
        names = cache.call_quietly("list_block_names", names, convert=to_block_names)[-MAX_NAMES:]
    return {
        "shares": shares,
        "names": names.tobytes(),
        "free_bytes": max(0, available) * core.arena.page_bytes,
        "bytes_per_token": (cache.estimate_bytes(longest) or 0) / longest,
    }
