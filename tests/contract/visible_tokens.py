"""Which keys each query of a row sees, by the definition of its strategy: computed from ids and positions alone."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.base import KVCache
from cache_strategies.quest.cache import QuestCache
from plugin_kit.driver.reference import Keeps, keep_all, visible_keys
from tests.contract.kinds.random_drop import RandomDropCache, list_kept
from tests.contract.rotary import find_streaming
from tests.kernels.brute_force import KEEPS

KIND_BY_CLASS = {pkgutil.resolve_name(cls): kind for kind, cls in registry.BUILTIN.items()}


def find_keeps(cache: KVCache, kind: str) -> Keeps | None:
    """Return which keys a strategy keeps for which queries; None if it is not known, or depends on the text."""
    if kind in KEEPS:
        return KEEPS[kind](cache.options)
    return keep_all if cache.contract.exact else None


def define(cache: KVCache, ids: Sequence[int], layer: int, start: int, n: int) -> Tensor | None:
    """Return what visible_in_row() returns, for checks that know no kinds."""
    return visible_in_row(cache, KIND_BY_CLASS.get(type(cache), ""), ids, layer, start, n)


def visible_in_row(cache: KVCache, kind: str, ids: Sequence[int], layer: int, start: int, n: int) -> Tensor | None:
    """Return the mask [H, n, start + n] of the keys that n queries from position `start` on see; None if not known.

    `ids` are those of the text up to the row's end, or longer.
    """
    spec, end = cache.setup.geometry.layers[layer], start + n
    keeps = find_keeps(cache, kind)
    if keeps is not None:
        return visible_keys(spec, end, keeps, first=start).expand(spec.num_kv_heads, n, end)
    if isinstance(cache, QuestCache) and n > 1:
        return visible_keys(spec, end, first=start).expand(spec.num_kv_heads, n, end)
    if (streaming := find_streaming(cache, kind)) is not None:
        return streaming.visible_keys(spec, start, end).expand(spec.num_kv_heads, n, end)
    if not isinstance(cache, RandomDropCache):
        return None
    heads = []
    for head in range(spec.num_kv_heads if cache.split_heads else 1):
        is_kept = torch.zeros(end, dtype=torch.bool)
        is_kept[list_kept(start, cache.every, layer, head)] = True
        is_kept[start:] = True  # tokens are dropped between rows
        heads.append(visible_keys(spec, end, first=start) & is_kept)
    return torch.stack(heads).expand(spec.num_kv_heads, n, end)
