"""Finds strategy kinds by name, and builds the instances that the settings declare. Does not know how they work.

A third-party kind is a package with an entry point in the group `kvmux.cache_strategies` naming a KVCache subclass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cache_strategies.base import INTERFACE_VERSION, CacheSetup, KVCache, Options
from cache_strategies.checkpoints import load_policy
from cache_strategies.checkpoints.base import CheckpointOptions
from cache_strategies.memory import Bounds, Memory
from cache_strategies.plugins import MissingClassError, list_plugins, load_class
from cache_strategies.states.cache import PairedStrategy, StateCache
from cache_strategies.types import Geometry, Sizes
from config.errors import SettingsError
from config.settings import StrategySettings
from config.sizes import share_to_bytes
from config.wording import explain_problem
from kernels.ops import Ops

ENTRY_POINT_GROUP = "kvmux.cache_strategies"

HOW_TO_CHANGE = (
    "change the class as docs/guide/writing_a_strategy.md says under 'From version 2 to 3', and set its "
    f"interface_version = {INTERFACE_VERSION}"
)

BUILTIN: Mapping[str, str] = {  # imported on demand
    "compressed": "cache_strategies.compressed.cache:CompressedCache",
    "contiguous": "cache_strategies.contiguous:ContiguousCache",
    "mirrored": "cache_strategies.mirrored.cache:MirroredCache",
    "paged": "cache_strategies.paged.cache:PagedCache",
    "quest": "cache_strategies.quest.cache:QuestCache",
    "residual": "cache_strategies.residual.cache:ResidualCache",
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
    checkpoints: CheckpointOptions


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
    except MissingClassError:
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
    checkpoints = CheckpointOptions(
        load_policy(settings.checkpoints), settings.checkpoint_interval, settings.checkpoint_share
    )
    return DeclaredInstance(name, settings.kind, cls, options, settings.floor, settings.limit, checkpoints)


def _format_option_error(name: str, options: type[Options], problem: Any) -> str:
    location = ".".join(("strategies", name, *(str(part) for part in problem["loc"])))
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(options.model_fields)) or "none"
        return f"{location} is not an option of this kind; its options are: {known}"
    return explain_problem(location, problem)


# -------------------------------------------------------------------- sizes of the memory and shares
def compute_sequence_bytes(
    instances: Sequence[DeclaredInstance], geometry: Geometry, round_block: Callable[[int], int]
) -> int:
    """Return the bytes of a sequence of max_seq_len tokens, in the instance that needs the most for it.

    A block takes round_block(bytes) bytes.
    """
    return max(_compute_longest(each, geometry, round_block) for each in instances)


def compute_least_bytes(
    instances: Sequence[DeclaredInstance], geometry: Geometry, round_block: Callable[[int], int]
) -> int:
    """Return the least bytes of a memory in which every instance can hold a sequence of max_seq_len tokens.

    Raises SettingsError if the floors and limits of the instances make that impossible.
    """
    needs = [_compute_longest(each, geometry, round_block) for each in instances]
    ceiling = 1 << 50
    fewest = bisect_left(range(1, ceiling), True, key=lambda total: _fits(instances, needs, total)) + 1
    if fewest == ceiling:
        raise SettingsError(
            "no amount of KV memory gives every strategy room for one sequence: raise the limits or lower the floors "
            f"of {', '.join(i.name for i in instances)}"
        )
    return fewest


def _compute_longest(instance: DeclaredInstance, geometry: Geometry, round_block: Callable[[int], int]) -> int:
    return compute_sizes(instance, geometry).count_bytes(geometry.max_seq_len, round_block)


def compute_sizes(instance: DeclaredInstance, geometry: Geometry) -> Sizes:
    """Return the memory that a sequence of an instance takes."""
    cls, options = _pair(instance, geometry)
    return cls.sizes(options, geometry)


def _pair(instance: DeclaredInstance, geometry: Geometry) -> tuple[type[KVCache[Any]], Any]:
    """Return the class and the options of an instance's cache: its strategy, beside states if the model has any."""
    if geometry.states:
        return StateCache, PairedStrategy(instance.cls, instance.options, instance.checkpoints)
    return instance.cls, instance.options


def _fits(instances: Sequence[DeclaredInstance], needs: Sequence[int], total: int) -> bool:
    shares = [compute_share(each, total) for each in instances]
    floors = sum(share.floor for share in shares)
    return floors <= total and all(
        need <= min(share.limit, total - floors + share.floor) for need, share in zip(needs, shares, strict=True)
    )


def compute_share(instance: DeclaredInstance, total: int) -> Bounds:
    """Return the floor and the limit of an instance in a memory of `total` bytes."""
    floor, limit = (min(share_to_bytes(share, total), total) for share in (instance.floor, instance.limit))
    return Bounds(floor, limit)


def build_caches(
    instances: Sequence[DeclaredInstance], geometry: Geometry, memory: Memory, ops: Ops, model: str = ""
) -> dict[str, KVCache]:
    """Build the cache of each instance, with its share (floor and limit) of the memory; return the caches by name.

    `model` identifies the model in block hashes, so that no keys of another model are reused.
    """
    caches = {each.name: build_cache(each, geometry, memory, ops, model) for each in instances}
    for each in instances:
        memory.set_share(each.name, **compute_share(each, memory.planned_bytes)._asdict())
    return caches


def build_cache(instance: DeclaredInstance, geometry: Geometry, memory: Memory, ops: Ops, model: str = "") -> KVCache:
    """Build the cache of one instance; if there was one of this name, the new one takes over its share of memory."""
    own = memory.add_instance(instance.name)
    cls, options = _pair(instance, geometry)
    cache = cls(CacheSetup(instance.name, geometry, own, ops, model), options)
    assert hasattr(cache, "contract"), f"{instance.cls.__name__}.__init__ must set self.contract"
    memory.set_owner(instance.name, cache)
    memory.set_sizes(instance.name, cls.sizes(options, geometry), geometry.max_seq_len)
    return cache
