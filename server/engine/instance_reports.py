"""Reads what a strategy instance reports: memory by use, blocks, dropped tokens, cached prefixes.

A fault in a report is counted and logged, and gives a default; it is no reason for a quarantine. Reports of plug-ins
become plain values, so that JSON can hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from cache_strategies.errors import StrategyError
from cache_strategies.features import (
    BlockDescribing,
    BlockMarking,
    Budgeted,
    PrefixListing,
    Reporting,
)
from cache_strategies.memory import Region
from cache_strategies.types import BlockInfo, Blocks, BlockState, CachedPrefix, CacheUsage
from server.engine.instance import Instance
from server.engine.isolation.checks import check_int, to_plain
from server.records import KVTokens

T = TypeVar("T")


def report(instance: Instance, method: str, kind: Any, default: T, *args: Any, target: object = None) -> T:
    """Return what a method of the strategy (or `target`) reports, as plain values of a type.

    After a fault return the default.
    """
    target = target or instance.strategy
    return instance.attempt(method, lambda: to_plain(getattr(target, method)(*args), kind), default)


def read_usage(instance: Instance) -> CacheUsage:
    """Return the memory by use: as the strategy reports it, or as far as the engine knows."""
    held, idle = instance.memory.get_held_bytes(instance.name), instance.idle_bytes
    num_tokens = sum(instance.read_lengths())
    known = CacheUsage(instance.num_open, num_tokens, held, held - idle, idle, 0, instance.limit_bytes)
    strategy, states = instance.strategy, instance.states
    if not isinstance(strategy, Reporting):
        return known

    def read() -> CacheUsage:
        usage: CacheUsage = to_plain(strategy.usage(), CacheUsage)
        return usage if states is None else states.add_usage(usage)

    return instance.attempt("usage", read, known)


def read_blocks(instance: Instance) -> Blocks:
    """Return the numbers of blocks by use; none if the strategy does not report them."""
    return report(instance, "blocks", Blocks, Blocks()) if isinstance(instance.strategy, Reporting) else Blocks()


def read_checkpoint_bytes(instance: Instance) -> int:
    """Return the bytes of the checkpoints of recurrent states, in use or idle; 0 for a model without states."""
    slots = None if instance.states is None else instance.states.slots
    return 0 if slots is None else slots.num_checkpoints * slots.region.size


def count_tokens(instance: Instance, lengths: Iterable[int] | None = None) -> KVTokens:
    """Return the kept and dropped tokens of sequences with these lengths, by default of all that are open.

    After a fault none counts as dropped.
    """
    lengths = instance.read_lengths() if lengths is None else list(lengths)
    dropped = 0 if instance.contract.exact else instance.count_dropped_tokens(lengths)
    return KVTokens(sum(lengths) - dropped, dropped)


def read_budget(instance: Instance, length: int) -> int | None:
    """Return how many tokens of a text are kept at most; None: there is no budget, or after a fault."""
    strategy = instance.strategy
    if not isinstance(strategy, Budgeted):
        return None

    def read() -> int | None:
        budget = strategy.budget(length)
        return None if budget is None else check_int("the budget", budget, length)

    return instance.attempt("budget", read, None)


def list_prefixes(instance: Instance, limit: int) -> tuple[Sequence[CachedPrefix], int]:
    """Return up to `limit` nodes of the tree of cached prefixes, and the number of others; after a fault, none."""
    if not isinstance(instance.strategy, PrefixListing):
        return (), 0
    nothing: tuple[Sequence[CachedPrefix], int] = ((), 0)
    kind = tuple[Annotated[list[CachedPrefix], msgspec.Meta(max_length=limit)], int]
    return report(instance, "list_prefixes", kind, nothing, limit)


def read_block_states(instance: Instance, region: Region) -> Tensor:
    """Return the `BlockState` by page of a region, uint8: of its blocks at their first pages, FREE elsewhere.

    Blocks are IN_USE if the strategy marks none, or after a fault.
    """
    states = torch.zeros(region.placement.extent, dtype=torch.uint8)
    used = torch.tensor(region.placement.list_used(), dtype=torch.int64)
    states[used] = int(BlockState.IN_USE)
    marking = _find_user(instance, region)
    if instance.is_suspended or not isinstance(marking, BlockMarking):
        return states
    marks = states.clone()
    try:
        with instance.guard["mark_blocks"]:
            marking.mark_blocks(region, marks)
            if marks.shape != states.shape or marks.dtype != states.dtype:
                raise ValueError(f"it turned the states, {list(states.shape)}, into {list(marks.shape)}")
            is_known = (marks[used] > int(BlockState.FREE)) & (marks[used] <= max(BlockState))
            states[used] = torch.where(is_known, marks[used], states[used])
    except StrategyError:
        pass
    return states


def find_block_info(instance: Instance, region: Region, block: int) -> BlockInfo | None:
    """Return what the strategy knows about one of its blocks, if anything."""
    user = _find_user(instance, region)
    if not isinstance(user, BlockDescribing):
        return None
    info: BlockInfo | None = report(instance, "describe_block", BlockInfo | None, None, region, block, target=user)
    return info


def _find_user(instance: Instance, region: Region) -> object:
    """Return what keeps its blocks in a region: the strategy, or the states beside it."""
    states = instance.states
    return states.slots if states is not None and region is states.slots.region else instance.strategy
