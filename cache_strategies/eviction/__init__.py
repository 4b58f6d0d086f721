"""Which of the blocks that nobody uses go first. A policy is one small file; `base.py` says what it is asked.

A policy of one's own is a package with an entry point in the group `kvmux.eviction_policies` naming an EvictionPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.eviction.base import EvictionPolicy
from cache_strategies.plugins import installed, load_class

ENTRY_POINTS = "kvmux.eviction_policies"

BUILTIN: Mapping[str, str] = {
    "lru": "cache_strategies.eviction.lru:LRU",
    "s3fifo": "cache_strategies.eviction.s3fifo:S3FIFO",
}


def policies() -> dict[str, str]:
    """Every policy that is installed, as "module:Class"."""
    return installed(ENTRY_POINTS, BUILTIN)


def load_policy(name: str) -> type[EvictionPolicy]:
    """The class of a policy. Raises SettingsError listing those there are, or saying what is wrong with this one."""
    known = BUILTIN if name in BUILTIN else policies()  # looking for plug-ins takes a while
    return load_class(name, known, EvictionPolicy, what="eviction policy", plural="policies")  # type: ignore[type-abstract]
