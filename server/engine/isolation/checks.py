"""Checks what a plug-in's plan says before kernels read it, and describes strange values for messages.

The functions raise TypeError or ValueError, and whatever a strategy's object raises while it is read: call them in a
region of the instance (engine/instance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cache_strategies.arena import Arena
from cache_strategies.types import Geometry
from kernels.arguments import MAX_INDEX, by_head
from kernels.ops import KVLocation, QueryTap
from kernels.types import Slots

MAX_DESCRIPTION = 500  # maximum number of characters of a value or an error in a message


def describe(value: object) -> str:
    """Return a value's repr for a message, shortened if it is long; its type if it has no repr."""
    return _shorten(repr, value)


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception, shortened if it is long."""
    return f"{type(error).__name__}: {_shorten(str, error)}"


def _shorten(write: Any, value: object) -> str:
    try:
        text = write(value)
    except Exception:  # of the strategy's class
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= MAX_DESCRIPTION else f"{text[:MAX_DESCRIPTION]}..."


def check_locations(locations: Sequence[object]) -> None:
    """Raise unless each of a plan's locations is None, or has the type and the window that kernels expect."""
    for location in locations:
        if location is None:
            continue
        if not isinstance(location, KVLocation):
            raise TypeError(f"kv_location() returned {describe(location)}, not a KVLocation or None")
        if location.window is not None and (type(location.window) is not int or location.window < 1):
            raise ValueError(f"kv_location() has the window {describe(location.window)}")


def check_pages(
    locations: Sequence[KVLocation | None], windows: Sequence[int | None], arena: Arena, owner: str
) -> None:
    """Raise ValueError if kernels would read or write pages of the arena that do not belong to `owner`.

    `locations` and `windows` are those of the model's layers; the addresses must lie in the stores. Nothing is checked
    on another device than a CPU, as reading addresses there waits for it.
    """
    widest: dict[int, tuple[KVLocation, int]] = {}  # by location: the widest window of its layers
    for location, window in zip(locations, windows, strict=True):
        if location is not None and location.store.memory.data_ptr() == arena.memory.data_ptr():
            reach = min(MAX_INDEX if each is None else each for each in (window, location.window))
            widest[id(location)] = location, max(reach, widest.get(id(location), (location, 0))[1])
    for (store, at, _), reach in widest.values():
        if store.memory.is_cpu:
            pages = _find_used_blocks(at, reach)[:, None] + torch.arange(store.pages_per_block)
            if not arena.owns(owner, pages.numpy()):
                raise ValueError("the table has blocks in pages that belong to no strategy, or to another one")


def _find_used_blocks(at: Slots, reach: int) -> Tensor:
    """Return the blocks [n] that kernels read or write for queries that see the latest `reach` tokens of a row."""
    start = by_head(at.start)  # [B, 1 or H], like `first` and `end`
    end = start + at.q_start.diff().long()[:, None]
    first = (start - reach + 1).clamp_min(0)
    if at.window_start is not None:
        first = by_head(at.window_start)[at.q_start[:-1].long()]
    elif at.ring or at.sinks:
        first, end = torch.zeros_like(start), end.clamp_max(at.sinks + at.ring) if at.ring else end
    begin = torch.arange(at.table.shape[1]) * at.block_size  # of each block among the tokens of a row
    is_used = (begin + at.block_size > first[..., None]) & (begin < end[..., None]) & (start >= 0)[..., None]
    return at.table[by_head(at.table_row).clamp_min(0)][is_used].long()


def check_tap(tap: object, num_tokens: int, geometry: Geometry) -> None:
    """Raise unless a plan's query tap names tokens of the plan, and has room for their queries.

    The numbers of the tokens are checked on a CPU only, as reading them elsewhere waits for the device.
    """
    if not isinstance(tap, QueryTap):
        raise TypeError(f"the plan has {describe(tap)} for a query_tap, not a QueryTap")
    tokens, queries = tap
    if tokens.dtype is not torch.int64 or tokens.dim() != 1 or len(queries) != len(geometry.layers):
        raise ValueError("query_tap: expected a vector of int64, and a tensor or None for each layer")
    if tokens.is_cpu and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < num_tokens:
        raise ValueError(f"query_tap: tokens must be from 0 to {num_tokens - 1}")
    for each, spec in zip(queries, geometry.layers, strict=True):
        shape = (len(tokens), spec.num_q_heads, spec.head_dim)
        if each is not None and (tuple(each.shape) != shape or not each.is_contiguous()):
            raise ValueError(f"query_tap: expected dense queries of shape {shape}")
