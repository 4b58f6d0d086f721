"""A strategy by itself, outside the server: with an arena of its own, keeping keys and values that others attend to.

Knows strategies by the registry, and neither a model nor whoever attends.
"""

from __future__ import annotations

from typing import Any

import torch

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import Geometry, KVCache
from config.settings import StrategySettings
from kernels.backends import load_ops
from kernels.device import device_of
from kernels.ops import Ops


def build_standalone_cache(kind: str, options: dict[str, Any], geometry: Geometry, device: torch.device) -> KVCache:
    """Build a cache whose `attend` only writes, with room for all seats at full length. Raises SettingsError."""
    instances = registry.resolve_instances({kind: StrategySettings(kind=kind, **options)})
    pages = max(1, geometry.max_seats * registry.sequence_pages(instances, geometry))
    ops: Any = _KeepingOps(load_ops(device_of(device), geometry.kv_dtype).ops)
    with torch.inference_mode(False):  # memory made in inference mode could not be written outside of it
        arena = Arena(pages, registry.page_bytes(instances, geometry), device)
        return registry.build_caches(instances, geometry, arena, ops)[kind]


class _KeepingOps:
    """The operations of a device, but for attention, of which there is none."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any, **kwargs: Any) -> None:
        """Leave `out` as it is."""
