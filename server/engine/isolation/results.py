"""Converts what strategies return into plain values of the expected types, and refuses what is not of these types.

The functions raise TypeError or ValueError, and whatever a strategy's object raises while it is read: call them as a
part of the strategy's call. Knows neither caches nor faults.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from cache_strategies.arena import Arena
from cache_strategies.base import Plan, Row, Seat
from cache_strategies.types import (
    BlockEvents,
    BlockNaming,
    Blocks,
    CachedPrefix,
    CacheUsage,
    Geometry,
    Miss,
    PageInfo,
    PageState,
    Pin,
    Salt,
)
from config.block_hashes import NAME_TYPE
from kernels.arguments import MAX_INDEX, by_head
from kernels.ops import KVLocation, QueryTap
from kernels.types import Slots

T = TypeVar("T")

MAX_DESCRIPTION = 500  # maximum number of characters of a value or an error in a message
MAX_NUMBER = 2**63  # numbers from here on cannot be sent
MAX_TEXT = 1024  # maximum number of characters of an id, a tenant or a salt
MAX_PINS = 10_000  # maximum number of pins that end with a listed prefix
# What `out` of a hook is filled with before the call: a NaN that no computation gives, by the size of its numbers
UNWRITTEN = {2: (torch.int16, 0x7FDE), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF80000DEADBEEF)}
MISSES = {*get_args(Miss), None}


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


# ---------------------------------------------------------------- reports
def to_usage(found: object) -> CacheUsage:
    """Return what usage() returned, with int fields."""
    if not isinstance(found, CacheUsage):
        raise TypeError(f"it returned {describe(found)}, not a CacheUsage")
    return CacheUsage(*map(_to_int, found))


def to_blocks(found: object) -> Blocks:
    """Return what blocks() returned, with int fields."""
    if not isinstance(found, Blocks):
        raise TypeError(f"it returned {describe(found)}, not Blocks")
    return Blocks(*map(_to_int, found))


def to_events(found: object) -> BlockEvents | None:
    """Return what collect_block_events() returned, with numbers."""
    if found is None:
        return None
    if not isinstance(found, BlockEvents):
        raise TypeError(f"it returned {describe(found)}, not BlockEvents or None")
    copies, *seconds = found
    return BlockEvents(_to_int(copies), *([float(each) for each in times] for times in seconds))


def to_pages(found: Iterable[int], num_pages: int) -> set[int]:
    """Return those of the pinned pages that are in an arena of `num_pages` pages."""
    return {page for page in found if 0 <= page < num_pages}


def to_page_info(found: object) -> PageInfo:
    """Return what describe_page() returned, with numbers."""
    if not isinstance(found, PageInfo):
        raise TypeError(f"it returned {describe(found)}, not a PageInfo or None")
    return PageInfo(
        _to_optional(_to_int, found.first_token),
        _to_optional(_to_int, found.num_tokens),
        _to_int(found.references),
        _to_int(found.num_pins),
        _to_optional(_to_seconds, found.age),
        _to_optional(_to_seconds, found.idle),
        _to_optional(_to_text, found.prefix),
    )


def to_page_states(states: Tensor, in_use: Tensor) -> Tensor:
    """Return the `PageState` of each page that mark_pages() wrote; `in_use` for those that are none."""
    if states.shape != in_use.shape or states.dtype != in_use.dtype:
        raise ValueError(f"it turned the states, {list(in_use.shape)}, into {list(states.shape)} of {states.dtype}")
    return torch.where(states <= max(PageState), states, in_use)


def to_prefixes(found: tuple[Iterable[object], int], limit: int) -> tuple[Sequence[CachedPrefix], int]:
    """Return what list_prefixes() returned, with texts and numbers. Raises ValueError for more than `limit`."""
    prefixes, omitted = found
    return [_to_prefix(each) for each in _take("prefixes", prefixes, limit)], _to_int(omitted)


def to_block_naming(found: object) -> BlockNaming | None:
    """Return what block_naming() returned, with plain values."""
    if found is None:
        return None
    if not isinstance(found, BlockNaming):
        raise TypeError(f"it returned {describe(found)}, not a BlockNaming or None")
    return BlockNaming(_to_int(found.block_size), bytes(found.root))


def to_block_names(found: Iterable[int]) -> array[int]:
    """Return what list_block_names() returned as numbers of 32 bits."""
    return array(NAME_TYPE, found)


def _to_prefix(found: object) -> CachedPrefix:
    if not isinstance(found, CachedPrefix):
        raise TypeError(f"it returned {describe(found)}, not a CachedPrefix")
    tenant, cache_salt, shadow = found.salt
    return CachedPrefix(
        _to_text(found.id),
        _to_optional(_to_text, found.parent),
        Salt(_to_text(tenant), _to_text(cache_salt), bool(shadow)),
        _to_int(found.first_token),
        _to_int(found.num_tokens),
        _to_int(found.num_bytes),
        _to_int(found.references),
        _to_int(found.hits),
        _to_seconds(found.age),
        _to_optional(_to_seconds, found.idle),
        [_to_text(pin_id) for pin_id in _take("pins", found.pins, MAX_PINS)],
    )


def to_pin(found: object) -> Pin:
    """Return what pin() or pin_prefix() returned, with text and numbers."""
    if not isinstance(found, Pin):
        raise TypeError(f"it returned {describe(found)}, not a Pin")
    num_tokens, num_bytes = _to_int(found.num_tokens), _to_int(found.num_bytes)
    return Pin(_to_text(found.id), num_tokens, num_bytes, found.salt, _to_seconds(found.expires))


def to_pins(found: Iterable[object]) -> list[Pin]:
    """Return what pins() returned, with texts and numbers."""
    return [to_pin(each) for each in found]


def to_bool(found: object) -> bool:
    """Return a bool that a method returned. Raises TypeError for anything else."""
    if not isinstance(found, bool):
        raise TypeError(f"it returned {describe(found)}, not a bool")
    return found


def to_bytes(found: object) -> int:
    """Return a number of bytes that a method returned. Raises TypeError or ValueError for anything else."""
    if (size := _to_int(found)) < 0:
        raise ValueError(f"it returned {size} bytes")
    return size


def to_optional_bytes(found: object) -> int | None:
    """Return a number of bytes, or None, that a method returned. Raises as `to_bytes`."""
    return _to_optional(to_bytes, found)


def _take(what: str, found: Iterable[T], limit: int) -> list[T]:
    """Return all items of what a method returned. Raises ValueError if there are more than `limit`."""
    taken = list(islice(found, limit + 1))
    if len(taken) > limit:
        raise ValueError(f"it returned more than {limit} {what}")
    return taken


def _to_optional(convert: Callable[[Any], T], found: Any) -> T | None:
    return None if found is None else convert(found)


def _to_text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"it returned {describe(found)}, not a str")
    if len(found) > MAX_TEXT:
        raise ValueError(f"it returned a text of {len(found)} characters, more than {MAX_TEXT}")
    found.encode()  # raises UnicodeEncodeError, a ValueError, for halves of surrogate pairs
    return found


def _to_seconds(found: Any) -> float:
    if not math.isfinite(seconds := float(found)):
        raise ValueError(f"it returned {describe(found)} seconds")
    return seconds


def _to_int(number: Any) -> int:
    found = operator.index(number)
    if abs(found) >= MAX_NUMBER:
        raise ValueError(f"the number {describe(found)} is too large")
    return found


# ---------------------------------------------------------------- seats
def check_seat(seat: object, lengths: range) -> None:
    """Raise unless a new seat is sound, and its length is in `lengths`."""
    if not isinstance(seat, Seat):
        raise TypeError(f"it returned {describe(seat)}, not a Seat")
    if type(seat.length) is not int or seat.length not in lengths:
        wanted = f"which must be from {lengths[0]} to {lengths[-1]}"
        raise ValueError(f"a new seat has length {describe(seat.length)}, {wanted}")
    check_report(seat)


def check_report(seat: Seat) -> None:
    """Raise unless a seat's `cached` and `miss`, which are reported to clients, have values that they may have."""
    if type(seat.cached) is not int or not 0 <= seat.cached <= seat.length:
        raise ValueError(f"a seat of {seat.length} tokens has {describe(seat.cached)} cached ones")
    if seat.miss not in MISSES:
        raise ValueError(f"a seat has the unknown miss {describe(seat.miss)}")


def to_dropped_count(found: object, seat: Seat, *, exact: bool) -> int:
    """Return the number of a seat's dropped tokens. Raises ValueError if it cannot be right."""
    most = 0 if exact else seat.length
    if type(found) is not int or not 0 <= found <= most:
        wanted = f"which must be from 0 to {most}"
        raise ValueError(f"a seat of {seat.length} tokens has {describe(found)} dropped ones, {wanted}")
    return found


def to_budget(found: object, length: int, *, exact: bool) -> int:
    """Return the budget of a text of `length` tokens. Raises ValueError if it cannot be right."""
    least = length if exact else 0
    if type(found) is not int or not least <= found <= length:
        wanted = f"which must be from {least} to {length}"
        raise ValueError(f"a text of {length} tokens has a budget of {describe(found)}, {wanted}")
    return found


# ---------------------------------------------------------------- plans
class GuardedPlan(Plan):
    """A strategy's plan, with the positions of its rows, which are checked, and the addresses that it gave by layer.

    is_checked says whether the addresses were checked.
    """

    def __init__(
        self, inner: Plan, rows: Sequence[Row], locations: Sequence[KVLocation | None], positions: Sequence[int]
    ) -> None:
        self.inner = inner
        self.rows = rows
        self.query_tap = inner.query_tap
        self.is_checked = False
        self._locations = locations
        self._positions = positions

    def list_positions(self) -> Sequence[int]:
        return self._positions

    def kv_location(self, layer_idx: int) -> KVLocation | None:
        return self._locations[layer_idx]

    def list_kv_locations(self, num_layers: int) -> Sequence[KVLocation | None]:
        return self._locations

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.inner.attend(layer_idx, q, k, v, out)

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner.gather_kv(layer_idx, row)


def to_positions(found: Sequence[object], rows: Sequence[Row], max_seq_len: int) -> list[int]:
    """Return the position of each row's first token. Raises ValueError unless the model has those of all its tokens."""
    positions = []
    for position, row in zip(found, rows, strict=True):
        most = max_seq_len - row.num_tokens
        if type(position) is not int or not 0 <= position <= most:
            raise ValueError(f"a seat has the position {describe(position)}, which must be from 0 to {most}")
        positions.append(position)
    return positions


def check_locations(locations: Sequence[object]) -> None:
    """Raise unless each of a plan's locations is None, or has the type and the window that kernels expect."""
    for location in locations:
        if location is None:
            continue
        if not isinstance(location, KVLocation):
            raise TypeError(f"kv_location() returned {describe(location)}, not a KVLocation or None")
        if location.window is not None and (type(location.window) is not int or location.window < 1):
            raise ValueError(f"kv_location() has the window {describe(location.window)}")


def mark_unwritten(out: Tensor) -> None:
    """Fill the output of a hook with a number that has_unwritten() finds."""
    dtype, mark = UNWRITTEN[out.itemsize]
    out.view(dtype).fill_(mark)


def has_unwritten(out: Tensor) -> bool:
    """Return whether parts of the output of a hook were not written since mark_unwritten()."""
    if not math.isnan(out.sum().item()):
        return False  # the mark is a NaN, which no sum loses; one sum takes less time than a comparison
    dtype, mark = UNWRITTEN[out.itemsize]
    return bool((out.view(dtype) == mark).any())


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
