"""Eviction policies, which choose the idle block to evict next. Each is one file that implements `base.py`.

A third-party policy is a package with an entry point in the group `kvmux.eviction_policies` naming an EvictionPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.eviction.base import EvictionPolicy
from cache_strategies.plugins import list_plugins, load_plugin

ENTRY_POINT_GROUP = "kvmux.eviction_policies"

BUILTIN: Mapping[str, str] = {
    "lru": "cache_strategies.eviction.lru:LRU",
    "s3fifo": "cache_strategies.eviction.s3fifo:S3FIFO",
}


def list_policies() -> dict[str, str]:
    """Return all installed eviction policies by name, as "module:Class"."""
    return list_plugins(ENTRY_POINT_GROUP, BUILTIN)


def load_policy(name: str) -> type[EvictionPolicy]:
    """Return the class of an eviction policy. Raises SettingsError if it is unknown or cannot be loaded."""
    base: type[EvictionPolicy] = EvictionPolicy  # type: ignore[type-abstract]
    return load_plugin(name, ENTRY_POINT_GROUP, BUILTIN, base, what="eviction policy", plural="policies")
