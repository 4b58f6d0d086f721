"""Caches that share one memory, which is filled with NaN, as an engine would build them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cache_strategies import registry
from cache_strategies.address_ranges import AddressRanges
from cache_strategies.base import KVCache
from cache_strategies.features import SelfChecking
from cache_strategies.memory import Memory
from cache_strategies.one_tensor import OneTensor
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Sizes, Text
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Reading
from plugin_kit.driver.texts import MODEL, RandomText

POISON = 0xFF  # every byte 0xFF: NaN in float32, float16 and bfloat16


class World:
    """Caches by name that share one memory, all of which is filled with NaN."""

    def __init__(
        self,
        strategies: Mapping[str, StrategySettings],
        ops: Ops,
        *,
        layers: Sequence[LayerSpec] = MODEL,
        dtype: torch.dtype = torch.float32,
        max_seats: int = 8,
        max_seq_len: int = 160,
        max_num_batched_tokens: int = 160,
        memory_bytes: int | None = None,
        space: type[AddressRanges] | type[OneTensor] | None = None,
        fill: int = POISON,
    ) -> None:
        """Make the caches. By default there is memory for twice `max_seats` sequences of max_seq_len per instance."""
        self.layers, self.dtype = layers, dtype
        self._declared = {each.name: each for each in registry.resolve_instances(strategies)}
        self._geometry = Geometry(layers, dtype, max_seats, max_seq_len, max_num_batched_tokens)
        space = space or find_space("cpu")
        if memory_bytes is None:
            longest = (self.get_sizes(name).count_bytes(max_seq_len, space.round_block) for name in self._declared)
            memory_bytes = 2 * max_seats * sum(max(1, each) for each in longest)
        self.memory = Memory(memory_bytes, space(memory_bytes, "cpu"))
        self.caches: dict[str, KVCache] = registry.build_caches(
            [*self._declared.values()], self._geometry, self.memory, ops
        )
        for each in self.list_tensors():
            each.fill_(fill)

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the memory of all regions, each once: regions may share one tensor."""
        regions = (region for name in self._declared for region in self.memory.list_regions(name))
        return [*{region.memory.data_ptr(): region.memory for region in regions}.values()]

    def copy_memory(self) -> list[torch.Tensor]:
        """Return copies of what `list_tensors` returns."""
        return [each.clone() for each in self.list_tensors()]

    def count_bytes(self, name: str, num_tokens: int) -> int:
        """Return the most bytes that a sequence of `num_tokens` tokens holds at one time, as its sizes() says."""
        return self.memory.count_sequence_bytes(name, num_tokens)

    def get_sizes(self, name: str) -> Sizes:
        """Return what sizes() says of an instance."""
        return registry.compute_sizes(self._declared[name], self._geometry)

    def open(self, name: str, text: RandomText, *, max_cached: int | None = None) -> Reading:
        """Open a sequence for a whole text."""
        opened = self.caches[name].open(Text(text.ids, max_cached=max_cached))
        assert opened is not None, "open() returned None although there is memory"
        return Reading(self.caches[name], text, opened)

    def check_integrity(self) -> None:
        """Assert that the bookkeeping of the memory and of all caches is consistent."""
        self.memory.check_integrity()
        for cache in self.caches.values():
            if isinstance(cache, SelfChecking):
                cache.check_integrity()
