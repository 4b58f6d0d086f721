"""Finds strategy kinds by name, and builds the instances that the settings declare. Does not know how they work.

A third-party kind is a package with an entry point in the group `kvmux.cache_strategies` naming a KVCache subclass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cache_strategies.arena import Arena
from cache_strategies.base import INTERFACE_VERSION, CacheSetup, KVCache, Options
from cache_strategies.plugins import MissingModuleError, list_plugins, load_class
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import StrategySettings
from config.sizes import share_to_bytes
from config.wording import explain_problem
from kernels.ops import Ops
from kernels.store import ALIGN

ENTRY_POINT_GROUP = "kvmux.cache_strategies"
MAX_PADDING = 0.05  # share of an instance's memory that another instance's page size may waste before it is reported

HOW_TO_CHANGE = (
    "change the class as docs/guide/strategies.md says under 'From version 1 to 2', and set its "
    f"interface_version = {INTERFACE_VERSION}"
)

BUILTIN: Mapping[str, str] = {  # imported on demand
    "compressed": "cache_strategies.compressed.cache:CompressedCache",
    "contiguous": "cache_strategies.contiguous:ContiguousCache",
    "mirrored": "cache_strategies.mirrored.cache:MirroredCache",
    "paged": "cache_strategies.paged.cache:PagedCache",
    "quest": "cache_strategies.quest.cache:QuestCache",
    "sliding_window": "cache_strategies.sliding_window:SlidingWindowCache",
    "streaming": "cache_strategies.streaming.cache:StreamingCache",
}


@dataclass(frozen=True)
class DeclaredInstance:
    """A strategy instance as the settings declare it, with its class and validated options."""

    name: str
    kind: str
    cls: type[KVCache]
    options: Any
    floor: str
    limit: str


# -------------------------------------------------------------------- kinds and options
def list_kinds() -> dict[str, str]:
    """Return all installed strategy kinds by name, as "module:Class"."""
    return list_plugins(ENTRY_POINT_GROUP, BUILTIN)


def load_kind(kind: str) -> type[KVCache]:
    """Return the class of a strategy kind: a name, or "module:Class" for one without an entry point.

    Raises SettingsError if it is unknown, cannot be loaded, or is written for another version of the interface.
    """
    is_builtin = kind in BUILTIN or kind in BUILTIN.values()
    known = BUILTIN if is_builtin or ":" in kind else list_kinds()  # which reads a file of every installed package
    try:
        cls = load_class(kind, known, KVCache, what="cache strategy kind", plural="kinds")  # type: ignore[type-abstract]
    except MissingModuleError:
        raise
    except SettingsError as error:
        hint = f"; if it is written for an earlier version of the interface, {HOW_TO_CHANGE}"
        raise SettingsError(f"{error}{hint if not is_builtin and (known.get(kind) or ':' in kind) else ''}") from None
    version = getattr(cls, "interface_version", 1)
    if not is_builtin and version != INTERFACE_VERSION:
        raise SettingsError(
            f"cache strategy kind {kind!r}: {cls.__name__} is written for version {version} of the interface, and this "
            f"server has version {INTERFACE_VERSION}: {HOW_TO_CHANGE}"
        )
    return cls


def resolve_instances(strategies: Mapping[str, StrategySettings]) -> list[DeclaredInstance]:
    """Return the declared instances, with kinds and options checked. Raises SettingsError naming the wrong option."""
    return [_resolve_instance(name, settings) for name, settings in strategies.items()]


def _resolve_instance(name: str, settings: StrategySettings) -> DeclaredInstance:
    cls = load_kind(settings.kind)
    try:
        options = cls.options_type.model_validate(settings.options)
    except ValidationError as error:
        message = "; ".join(_format_option_error(name, cls.options_type, problem) for problem in error.errors())
        raise SettingsError(message) from None
    return DeclaredInstance(name, settings.kind, cls, options, settings.floor, settings.limit)


def _format_option_error(name: str, options: type[Options], problem: Any) -> str:
    location = ".".join(("strategies", name, *(str(part) for part in problem["loc"])))
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(options.model_fields)) or "none"
        return f"{location} is not an option of this kind; its options are: {known}"
    return explain_problem(location, problem)


# -------------------------------------------------------------------- sizes of the arena, its pages and shares
def page_bytes(instances: Sequence[DeclaredInstance], geometry: Geometry) -> int:
    """Return the arena's page size in bytes: the size of that block with which the blocks of all others fit best.

    A block takes whole pages. With the smallest block as a page, one that is a little larger would take nearly twice
    its size. So the page is the block for which the largest share that any block wastes is smallest.

    Instances with one large block per sequence are left out, unless all are such: they waste less than one page per
    sequence whatever the page size.
    """
    shapes = [i.cls.seat_shape(i.options, geometry) for i in instances]
    shapes = [s for s in shapes if s.blocks > 1] or [s for s in shapes if s.blocks]
    sizes = sorted({shape.block_bytes for shape in shapes}) or [ALIGN]
    return min(sizes, key=lambda page: max(_pad(size, page) / size for size in sizes))


def _pad(size: int, page: int) -> int:
    """Return the bytes of the pages that a block of `size` bytes takes."""
    return -(-size // page) * page


def describe_padding(instances: Sequence[DeclaredInstance], geometry: Geometry) -> list[str]:
    """Return a line for each instance whose blocks take more memory because a page is a block of another instance."""
    page = page_bytes(instances, geometry)
    lines = []
    for instance in instances:
        size = instance.cls.seat_shape(instance.options, geometry).block_bytes
        alone, here = _pad(size, page_bytes([instance], geometry)), _pad(size, page)
        if here > alone * (1 + MAX_PADDING):
            chosen = next(i.name for i in instances if page_bytes([i], geometry) == page)
            lines.append(
                f"strategy {instance.name!r} takes {here / alone - 1:.0%} more memory than without strategy "
                f"{chosen!r}: its blocks of {alone} bytes take {here // page} pages of {page} bytes, the size of a "
                f"block of {chosen!r}"
            )
    return lines


def sequence_pages(instances: Sequence[DeclaredInstance], geometry: Geometry) -> int:
    """Return the number of pages of a sequence of max_seq_len tokens, in the instance that needs the most for it."""
    page = page_bytes(instances, geometry)
    return max(_pages_per_sequence(i, geometry, page) for i in instances)


def compute_min_pages(instances: Sequence[DeclaredInstance], geometry: Geometry) -> int:
    """Return the smallest number of pages of an arena in which every instance can hold a sequence of max_seq_len.

    Raises SettingsError if the floors and limits of the instances make that impossible.
    """
    page = page_bytes(instances, geometry)
    needs = [_pages_per_sequence(i, geometry, page) for i in instances]
    ceiling = 1 << 40
    fewest = bisect_left(range(1, ceiling), True, key=lambda pages: _fits(instances, needs, pages, page)) + 1
    if fewest == ceiling:
        raise SettingsError(
            "no amount of KV memory gives every strategy room for one sequence: raise the limits or lower the floors "
            f"of {', '.join(i.name for i in instances)}"
        )
    return fewest


def _pages_per_sequence(instance: DeclaredInstance, geometry: Geometry, page: int) -> int:
    shape = instance.cls.seat_shape(instance.options, geometry)
    return shape.blocks * -(-shape.block_bytes // page)


def _fits(instances: Sequence[DeclaredInstance], needs: Sequence[int], pages: int, page: int) -> bool:
    shares = [compute_share(i, pages, page) for i in instances]
    floors = sum(floor for floor, _ in shares)
    return floors <= pages and all(
        need <= min(limit, pages - floors + floor) for need, (floor, limit) in zip(needs, shares, strict=True)
    )


def compute_share(instance: DeclaredInstance, pages: int, page: int) -> tuple[int, int]:
    """Return (floor, limit) of an instance in pages, for an arena of `pages` pages of `page` bytes each."""
    total = pages * page
    return min(share_to_bytes(instance.floor, total), total) // page, min(
        share_to_bytes(instance.limit, total), total
    ) // page


def build_caches(
    instances: Sequence[DeclaredInstance], geometry: Geometry, arena: Arena, ops: Ops, model: str = ""
) -> dict[str, KVCache]:
    """Build the cache of each instance and set its share (floor and limit) of the arena; return the caches by name.

    `model` identifies the model in block hashes, so that no keys of another model are reused.
    """
    caches = {}
    for instance in instances:
        cache = build_cache(instance, geometry, arena, ops, model)
        floor, limit = compute_share(instance, arena.pages, arena.page_bytes)
        arena.set_share(instance.name, floor=floor, limit=limit)
        shape = instance.cls.seat_shape(instance.options, geometry)
        run = -(-shape.block_bytes // arena.page_bytes)
        arena.set_longest_sequence(instance.name, shape.blocks * run, max(1, run))
        caches[instance.name] = cache
    return caches


def build_cache(instance: DeclaredInstance, geometry: Geometry, arena: Arena, ops: Ops, model: str = "") -> KVCache:
    """Build the cache of one instance; if there was one of this name, the new one takes over its share of the arena."""
    cache = instance.cls(CacheSetup(instance.name, geometry, arena, ops, model), instance.options)
    assert hasattr(cache, "contract"), f"{instance.cls.__name__}.__init__ must set self.contract"
    return cache
