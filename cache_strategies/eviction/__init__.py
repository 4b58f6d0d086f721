"""Which of the blocks that nobody uses go first. A policy is one small file; `base.py` says what it is asked.

A policy of one's own is a package with an entry point in the group `kvmux.eviction_policies` naming an EvictionPolicy.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points

from cache_strategies.eviction.base import EvictionPolicy
from config.settings import SettingsError

ENTRY_POINTS = "kvmux.eviction_policies"

BUILTIN: Mapping[str, str] = {
    "lru": "cache_strategies.eviction.lru:LRU",
    "s3fifo": "cache_strategies.eviction.s3fifo:S3FIFO",
}


def policies() -> dict[str, str]:
    """Every policy that is installed, as "module:Class"."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | dict(BUILTIN)


def load_policy(name: str) -> type[EvictionPolicy]:
    """The class of a policy. Raises SettingsError listing those there are, or saying what is wrong with this one."""
    known = BUILTIN if name in BUILTIN else policies()
    if name not in known:
        raise SettingsError(f"there is no eviction policy {name!r}; policies are {', '.join(sorted(known))}")
    try:
        cls = pkgutil.resolve_name(known[name])
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"eviction policy {name!r}: cannot load {known[name]}: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, EvictionPolicy)):
        raise SettingsError(f"eviction policy {name!r}: {known[name]} is no subclass of EvictionPolicy")
    return cls
