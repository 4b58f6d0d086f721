"""Finds strategy kinds by name, and builds the instances that settings declare. Knows no strategy by its contents.

A kind of one's own is a package with an entry point in the group `kvmux.cache_strategies` naming a KVCache subclass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from pydantic import ValidationError

from cache_strategies.base import CacheSetup, KVCache, Options
from config.settings import SettingsError, StrategySettings
from config.sizes import share_of
from kernels.arena import Arena
from kernels.ops import LayerSpec, Ops
from kernels.store import block_bytes

ENTRY_POINTS = "kvmux.cache_strategies"

BUILTIN: Mapping[str, str] = {  # imported on demand
    "contiguous": "cache_strategies.contiguous:ContiguousCache",
    "paged": "cache_strategies.paged:PagedCache",
    "sliding_window": "cache_strategies.sliding_window:SlidingWindowCache",
}


def kinds() -> dict[str, str]:
    """Every kind that is installed, as "module:Class"."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | dict(BUILTIN)


def load_kind(kind: str) -> type[KVCache]:
    """The class of a kind. Raises SettingsError listing the kinds there are."""
    known = kinds()
    if kind not in known:
        raise SettingsError(f"there is no cache strategy kind {kind!r}; kinds are {', '.join(sorted(known))}")
    module, _, attribute = known[kind].partition(":")
    cls = getattr(import_module(module), attribute)
    assert issubclass(cls, KVCache), f"{known[kind]} is no KVCache"
    return cls  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Geometry:
    """What the engine knows before there is any KV memory."""

    layers: Sequence[LayerSpec]
    kv_dtype: torch.dtype
    max_seats: int
    max_seq_len: int
    max_step_tokens: int


@dataclass(frozen=True)
class Declared:
    """An instance as the settings declare it, with its class and checked options."""

    name: str
    kind: str
    cls: type[KVCache]
    options: Any
    floor: str
    limit: str


def declared(strategies: Mapping[str, StrategySettings]) -> list[Declared]:
    """Checks kinds and options. Raises SettingsError naming the instance and the option."""
    return [
        Declared(name, s.kind, cls, _options(name, cls, s.options), s.floor, s.limit)
        for name, s in strategies.items()
        for cls in (load_kind(s.kind),)
    ]


def _options(name: str, cls: type[KVCache], options: Mapping[str, Any]) -> Options:
    try:
        return cls.options_type.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(cls.options_type.model_fields)) or "none"
        raise SettingsError(f"strategies.{name}.{option}: {first['msg']} (its options are: {known})") from None


def page_bytes(instances: Sequence[Declared], geometry: Geometry) -> int:
    """The arena's page: the smallest block of any instance, so that it is one page and larger ones are runs."""
    shapes = (d.cls.seat_shape(d.options, geometry.max_seq_len, geometry.max_step_tokens) for d in instances)
    return block_bytes(geometry.layers, min(shape.block_tokens for shape in shapes), geometry.kv_dtype)


def pages_needed(instances: Sequence[Declared], geometry: Geometry) -> int:
    """The fewest pages with which every instance, within its share, can hold one sequence of max_seq_len."""
    page = page_bytes(instances, geometry)
    needs = [_pages_of_longest(d, geometry, page) for d in instances]
    ceiling = 1 << 40
    fewest = bisect_left(range(ceiling), True, key=lambda pages: _fits(instances, needs, pages, page))
    if fewest == ceiling:
        raise SettingsError(
            "no amount of KV memory gives every strategy room for one sequence: raise the limits or lower the floors "
            f"of {', '.join(d.name for d in instances)}"
        )
    return fewest


def sequence_pages(instances: Sequence[Declared], geometry: Geometry) -> int:
    """Pages of one sequence of max_seq_len under the instance that needs most."""
    page = page_bytes(instances, geometry)
    return max(_pages_of_longest(d, geometry, page) for d in instances)


def _pages_of_longest(d: Declared, geometry: Geometry, page: int) -> int:
    shape = d.cls.seat_shape(d.options, geometry.max_seq_len, geometry.max_step_tokens)
    return shape.blocks * -(-block_bytes(geometry.layers, shape.block_tokens, geometry.kv_dtype) // page)


def _fits(instances: Sequence[Declared], needs: Sequence[int], pages: int, page: int) -> bool:
    shares = [share_pages(d, pages, page) for d in instances]
    floors = sum(floor for floor, _ in shares)
    return floors <= pages and all(
        need <= min(limit, pages - floors + floor) for need, (floor, limit) in zip(needs, shares, strict=True)
    )


def share_pages(d: Declared, pages: int, page: int) -> tuple[int, int]:
    """Floor and limit of an instance, in pages of an arena of that many."""
    total = pages * page
    return min(share_of(d.floor, total), total) // page, min(share_of(d.limit, total), total) // page


def build(instances: Sequence[Declared], geometry: Geometry, arena: Arena, ops: Ops) -> dict[str, KVCache]:
    """The caches by name, each with its share of the arena."""
    caches = {}
    for d in instances:
        setup = CacheSetup(
            d.name,
            geometry.layers,
            arena,
            ops,
            geometry.kv_dtype,
            geometry.max_seats,
            geometry.max_seq_len,
            geometry.max_step_tokens,
        )
        caches[d.name] = d.cls(setup, d.options)
        floor, limit = share_pages(d, arena.pages, arena.page_bytes)
        arena.join(d.name, caches[d.name].reclaim, floor=floor, limit=limit)
    return caches
