"""Checkpoint policies: where recurrent states of a text are kept for later ones, and which are dropped first.

A third-party policy is a package with an entry point in the group `kvmux.checkpoint_policies` naming a
CheckpointPolicy.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.checkpoints.base import CheckpointPolicy
from cache_strategies.plugins import list_plugins, load_plugin

ENTRY_POINT_GROUP = "kvmux.checkpoint_policies"

BUILTIN: Mapping[str, str] = {
    "branches": "cache_strategies.checkpoints.placements:Branches",
    "interval": "cache_strategies.checkpoints.placements:Interval",
    "messages": "cache_strategies.checkpoints.placements:Messages",
}


def list_policies() -> dict[str, str]:
    """Return all installed checkpoint policies by name, as "module:Class"."""
    return list_plugins(ENTRY_POINT_GROUP, BUILTIN)


def load_policy(name: str) -> type[CheckpointPolicy]:
    """Return the class of a checkpoint policy. Raises SettingsError if it is unknown or cannot be loaded."""
    base: type[CheckpointPolicy] = CheckpointPolicy  # type: ignore[type-abstract]
    return load_plugin(name, ENTRY_POINT_GROUP, BUILTIN, base, what="checkpoint policy", plural="policies")
