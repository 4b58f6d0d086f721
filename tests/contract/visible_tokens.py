"""Which keys each query of a row sees, by the definition of its strategy: computed from ids and positions alone.

And whether gather_kv() returns these keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies.base import KVCache
from tests.contract.harness import Keys
from tests.contract.kinds.random_drop import RandomDropCache, list_kept
from tests.kernels.brute_force import KEEPS, Keeps, keep_all, visible_keys


def find_keeps(cache: KVCache, kind: str) -> Keeps | None:
    """Return which keys a strategy keeps for which queries; None if it is not known, or depends on the text."""
    if kind in KEEPS:
        return KEEPS[kind](cache.options)
    return keep_all if cache.contract.exact else None


def visible_in_row(cache: KVCache, kind: str, ids: Sequence[int], layer: int, start: int, n: int) -> Tensor | None:
    """Return the mask [H, n, start + n] of the keys that n queries from position `start` on see; None if not known.

    `ids` are those of the text up to the row's end, or longer.
    """
    spec, end = cache.setup.geometry.layers[layer], start + n
    keeps = find_keeps(cache, kind)
    if keeps is not None:
        return visible_keys(spec, end, keeps, first=start).expand(spec.num_kv_heads, n, end)
    if not isinstance(cache, RandomDropCache):
        return None
    heads = []
    for head in range(spec.num_kv_heads if cache.split_heads else 1):
        is_kept = torch.zeros(end, dtype=torch.bool)
        is_kept[list_kept(ids, start, cache.every, layer, head)] = True
        is_kept[start:] = True  # tokens are dropped between rows
        heads.append(visible_keys(spec, end, first=start) & is_kept)
    return torch.stack(heads).expand(spec.num_kv_heads, n, end)


def visible_in_text(cache: KVCache, kind: str, ids: Sequence[int], layer: int, chunk: int) -> Tensor:
    """Return the mask [H, T, T] of the keys that each query sees of a text that enters in rows of `chunk` tokens.

    If it is not known what the kind keeps, each query sees all keys that the model lets it see.
    """
    spec, length, keeps = cache.setup.geometry.layers[layer], len(ids), find_keeps(cache, kind)
    mask = visible_keys(spec, length, keeps or keep_all).repeat(spec.num_kv_heads, 1, 1)
    if keeps is not None:
        return mask
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        seen = visible_in_row(cache, kind, ids, layer, start, end - start)
        if seen is not None:
            mask[:, start:end, :end] = seen
    return mask


def check_keys(k: Tensor, v: Tensor, keys: Keys) -> Tensor:
    """Check that what gather_kv() returned are keys and values of a text, k [T,H,D] and v [T,H,Dv] up to the row's end.

    Return the mask [H, T] of the tokens that it lists.
    """
    kept_k, kept_v, positions = keys
    end, heads, _ = k.shape
    assert kept_k.shape[:2] == kept_v.shape[:2] == (len(positions), heads)
    listed = torch.zeros(heads, end, dtype=torch.bool)
    for head in range(heads):
        of_head = positions if positions.dim() == 1 else positions[:, head]
        at = of_head[of_head >= 0].long()
        assert at.tolist() == sorted({*at.tolist()})
        assert at[-1] == end - 1, "a token sees itself"
        assert torch.equal(kept_k[of_head >= 0, head], k[at, head]), "keys of other tokens"
        assert torch.equal(kept_v[of_head >= 0, head], v[at, head]), "values of other tokens"
        listed[head, at] = True
    return listed
