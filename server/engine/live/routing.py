"""Describes an engine for routers that choose between several: its cached blocks, its memory and its queue.

Has neither texts nor token ids, but the names of cached blocks (config/block_hashes.py). It is computed only if a
router asks for it.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

from cache_strategies.errors import StrategyError
from cache_strategies.features import BlockNames
from cache_strategies.types import BlockNaming
from config.block_hashes import NAME_TYPE
from server.engine.core import Core
from server.engine.instance import Instance
from server.engine.instance_reports import report

MAX_NAMES = 1 << 17  # most names of an instance's blocks in a description, which takes 4 bytes for each


def find_block_naming(instance: Instance) -> BlockNaming | None:
    """Return what the names of an instance's blocks are made of; None if it has none, or after a fault."""
    if not isinstance(instance.strategy, BlockNames):
        return None
    naming: BlockNaming | None = report(instance, "block_naming", BlockNaming | None, None)
    return naming


def _list_block_names(instance: Instance) -> array[int]:
    """Return the latest names of an instance's blocks; none after a fault."""
    names: array[int] = array(NAME_TYPE)
    if isinstance(instance.strategy, BlockNames):
        with suppress(StrategyError), instance.guard["list_block_names"]:
            names = array(NAME_TYPE, instance.strategy.list_block_names())
    return names[-MAX_NAMES:]


def describe_routing(core: Core) -> dict[str, Any]:
    """Return what `server.cluster.router` reads of a replica: its instances, and the work that waits."""
    requests = [*core.scheduler.running, *core.scheduler.waiting]
    queued_tokens = sum(max(0, request.num_prompt_tokens - request.num_computed_tokens) for request in requests)
    return {
        "instances": {
            name: _describe_instance(core, instance)
            for name, instance in core.instances.items()
            if name not in core.isolation.quarantined
        },
        "queued_tokens": queued_tokens,
        "num_requests": len(requests),
        "kv_usage": core.memory.usage,
    }


def _describe_instance(core: Core, instance: Instance) -> dict[str, Any]:
    longest, available = instance.setup.geometry.max_seq_len, core.memory.count_available_bytes(instance.name)
    shares = find_block_naming(instance) is not None
    names = _list_block_names(instance) if shares else array(NAME_TYPE)
    return {
        "shares": shares,
        "names": names.tobytes(),
        "free_bytes": max(0, available),
        "bytes_per_token": (instance.estimate_bytes(longest) or 0) / longest,
    }
