"""The instances that the contract tests run with, and worlds of caches that compute with the backend of the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cache_strategies import registry
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.reference.backend import ReferenceOps
from plugin_kit.driver import world
from tests.contract import kinds

AS_COMPUTED = {"k_dtype": "model", "v_dtype": "model"}  # so that keys can be compared
VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {  # options every built-in kind is tested with
    "compressed": [
        {"budget": 20, "every": 16, "recent": 4, "sinks": 2, "block_size": 8},
        {"budget": 0.3, "every": 10, "recent": 2, "by_layer": "pyramid", "scorer": "knorm", "block_size": 4},
        {"budget": 12, "every": 8, "recent": 3, "by_head": True, "scorer": "tova", "block_size": 16},
        {"budget": 24, "every": 20, "recent": 0, "scorer": "h2o", "by_head": True, "block_size": 16},
    ],
    "contiguous": [{}],
    "mirrored": [{}],
    "paged": [{}, {"block_size": 1}, {"block_size": 7}, {"block_size": 16, "prefix_cache": False}],
    "quest": [
        {},
        {"budget": 24, "block_size": 4},
        {"budget": 5, "block_size": 1},
        {"budget": 0.3, "min_tokens": 32, "block_size": 7, "prefix_cache": False},
    ],
    "residual": [
        {**AS_COMPUTED, "residual_length": 8, "sinks": 2, "block_size": 4},
        {**AS_COMPUTED, "residual_length": 1, "sinks": 0, "block_size": 1, "max_row": 20},
        {**AS_COMPUTED, "residual_length": 30, "max_row": 7, "prefix_cache": False},
    ],
    "sliding_window": [
        {},
        {"window": 1, "sinks": 0, "max_row": 20},
        {"window": 5, "sinks": 4, "max_row": 64},
        {"window": 40, "sinks": 0},
        {"window": 30, "sinks": 4, "max_row": 7},
    ],
    "streaming": [
        {},
        {"window": 9, "sinks": 2, "every": 5, "block_size": 4},
        {"window": 1, "sinks": 0, "every": 1, "block_size": 1},
        {"window": 40, "sinks": 3, "every": 16, "block_size": 7},
        {"window": 20, "sinks": 6, "every": 33},
    ],
}


def list_kinds() -> list[str]:
    """Return the names of all kinds: built-in ones, plug-ins and those of tests/contract/kinds."""
    with kinds.installed():
        return sorted(registry.list_kinds())


def every_instance() -> dict[str, StrategySettings]:
    """Return instances of every registered kind, by a name with their options; unknown kinds with defaults."""
    return {
        _name(kind, options): StrategySettings(kind=kind, **options)
        for kind in list_kinds()
        for options in VARIANTS.get(kind, [{}])
    }


def exact_instances() -> dict[str, StrategySettings]:
    """Return instances that keep all keys of these texts: paged with several block sizes, an unwrapped ring."""
    return {
        "contiguous": StrategySettings(kind="contiguous"),
        "ring": StrategySettings(kind="sliding_window", window=512, sinks=0),
        "ring_with_sinks": StrategySettings(kind="sliding_window", window=400, sinks=4),
        **{f"paged_{n}": StrategySettings(kind="paged", block_size=n) for n in (1, 7, 16, 32, 64)},
    }


def _name(kind: str, options: Mapping[str, Any]) -> str:
    return "-".join([kind, *(f"{key}_{value}" for key, value in options.items())])


def make_ops() -> Ops:
    """Return the operations with which a World computes by default; conftest.py replaces them by each backend's."""
    return ReferenceOps()


class World(world.World):
    """Caches in one memory that compute with the operations of the test, unless it gives others."""

    def __init__(self, strategies: Mapping[str, StrategySettings], *, ops: Ops | None = None, **sizes: Any) -> None:
        super().__init__(strategies, ops or make_ops(), **sizes)
