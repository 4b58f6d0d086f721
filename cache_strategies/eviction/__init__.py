"""Which of the blocks that nobody uses go first. A policy is one small file; `base.py` says what it is asked.

A policy of one's own is a package with an entry point in the group `kvmux.eviction_policies` naming an EvictionPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.eviction.base import EvictionPolicy
from cache_strategies.plugins import list_plugins, load_class

ENTRY_POINT_GROUP = "kvmux.eviction_policies"

BUILTIN: Mapping[str, str] = {
    "lru": "cache_strategies.eviction.lru:LRU",
    "s3fifo": "cache_strategies.eviction.s3fifo:S3FIFO",
}


def list_policies() -> dict[str, str]:
    """Return every policy that is installed, as "module:Class"."""
    return list_plugins(ENTRY_POINT_GROUP, BUILTIN)


def load_policy(name: str) -> type[EvictionPolicy]:
    """Return the class of a policy. Raises SettingsError: it lists the policies, or says what is wrong with this."""
    known = BUILTIN if name in BUILTIN else list_policies()  # looking for plug-ins takes a while
    return load_class(name, known, EvictionPolicy, what="eviction policy", plural="policies")  # type: ignore[type-abstract]
