"""A paged cache whose keys are int8 and whose values are as the model computes them: two formats in one store."""

from __future__ import annotations

from typing import Any

import torch

from cache_strategies.base import CacheSetup
from cache_strategies.memory import Region
from cache_strategies.paged.base import PagedOptions
from cache_strategies.paged.cache import PagedCache
from cache_strategies.paged.layer_groups import LayerGroup
from cache_strategies.types import Geometry
from kernels.store import KVStore, compute_block_bytes


class MixedFormatsCache(PagedCache):
    """Keeps keys in int8 and values in the model's dtype."""

    interface_version = 3

    def __init__(self, setup: CacheSetup, options: PagedOptions) -> None:
        super().__init__(setup, options)
        self.contract = self.contract._replace(exact=False)

    @classmethod
    def count_group_bytes(cls, group: LayerGroup, options: Any, geometry: Geometry) -> int:
        layers, block_size = [geometry.layers[i] for i in group.layers], cls.block_layout(options, geometry)[0]
        return compute_block_bytes(layers, block_size, torch.int8, geometry.kv_dtype)

    def make_group_store(self, group: LayerGroup, block_size: int, dtype: torch.dtype) -> tuple[Region, KVStore]:
        geometry = self.setup.geometry
        region = self.setup.memory.region(self.count_group_bytes(group, self.options, geometry))
        layers = {i: geometry.layers[i] for i in group.layers}
        return region, KVStore(region, layers, block_size, torch.int8, geometry.kv_dtype)
