"""Builds the cache of one strategy for use outside the server, with a memory of its own; the caller computes attention.

Finds strategies through the registry; knows neither models nor how attention is computed.
"""

from __future__ import annotations

from typing import Any

import torch

from cache_strategies import registry
from cache_strategies.base import KVCache
from cache_strategies.memory import make_memory
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry
from config.settings import StrategySettings
from kernels.backends import load_ops
from kernels.device import device_of
from kernels.ops import Ops


def build_standalone_cache(kind: str, options: dict[str, Any], geometry: Geometry, device: torch.device) -> KVCache:
    """Build a cache with memory for all sequences at full length; its attend() only writes keys and values.

    Raises SettingsError for an unknown kind or option.
    """
    instances = registry.resolve_instances({kind: StrategySettings(kind=kind, **options)})
    ops: Any = _WriteOnlyOps(load_ops(device_of(device), geometry.kv_dtype).ops)
    # leave inference mode, as tensors allocated in it cannot be written outside of it
    with torch.inference_mode(False):
        longest = registry.compute_sequence_bytes(instances, geometry, find_space(device).round_block)
        memory = make_memory(max(1, geometry.max_seats * longest), device)
        return registry.build_caches(instances, geometry, memory, ops)[kind]


class _WriteOnlyOps:
    """The operations of a device, with an attend() that does nothing."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the caller computes attention."""
