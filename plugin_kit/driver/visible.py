"""Which keys the queries of a row see, and whether a step's results are attention over exactly these keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cache_strategies.base import KVCache
from kernels.types import LayerSpec
from plugin_kit.driver.reference import TOLERANCE, attention, visible_keys
from plugin_kit.driver.steps import Keys, Reading, StepOutputs, turn

ROUNDING = 0.25  # of its norm, by which an instance that is not exact may change a key: as much as int4 does
# Returns the mask [H, n, start + n] of the keys that n queries from position `start` on see in a layer, by the
# definition of a strategy; None if it is not known. Gets (cache, ids of the text, layer, start, n).
Definition = Callable[[KVCache, Sequence[int], int, int, int], Tensor | None]


def define_exact(cache: KVCache, ids: Sequence[int], layer: int, start: int, n: int) -> Tensor | None:
    """Return all keys that the model lets the queries see, for an exact instance; None for others."""
    if not cache.contract.exact:
        return None
    spec = cache.setup.geometry.layers[layer]
    return visible_keys(spec, start + n, first=start).expand(spec.num_kv_heads, n, start + n)


def visible_in_text(cache: KVCache, definition: Definition, ids: Sequence[int], layer: int, chunk: int) -> Tensor:
    """Return the mask [H, T, T] of the keys that each query sees of a text that enters in rows of `chunk` tokens.

    Where the definition does not say it, each query sees all keys that the model lets it see.
    """
    spec, length = cache.setup.geometry.layers[layer], len(ids)
    mask = visible_keys(spec, length).repeat(spec.num_kv_heads, 1, 1)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        seen = definition(cache, ids, layer, start, end - start)
        if seen is not None:
            mask[:, start:end, :end] = seen
    return mask


def check_keys(k: Tensor, v: Tensor, keys: Keys, *, rounding: float = 0.0, is_moved: bool = False) -> Tensor:
    """Check that what gather() returned are keys and values of a text, k [T,H,D] and v [T,H,Dv] up to the row's end.

    They may differ by `rounding` times their norm. If k has been moved to positions within the cache, `is_moved`, the
    message says so. Return the mask [H, T] of the tokens that it lists.
    """
    kept_k, kept_v, positions = keys
    end, heads, _ = k.shape
    assert kept_k.shape[:2] == kept_v.shape[:2] == (len(positions), heads), (
        f"gather() returned K {list(kept_k.shape)}, V {list(kept_v.shape)} and positions {list(positions.shape)}"
    )
    listed = list_seen(keys, heads, end)
    for head in range(heads):
        of_head = positions if positions.dim() == 1 else positions[:, head]
        at = of_head[of_head >= 0].long()
        for what, kept, own in (("key", kept_k, k), ("value", kept_v, v)):
            found, wanted = kept[of_head >= 0, head], own[at, head]
            distance = (found.double() - wanted.double()).norm(dim=1)
            is_near = distance <= rounding * wanted.double().norm(dim=1)
            wrong = ~is_near if rounding else (found != wanted).any(1)
            first = at[wrong][:1].tolist()
            assert not first, (
                f"gather(): the {what} at position {first} (KV head {head}, {end} tokens) is not the one that was "
                f"written there{', rotated to its position within the cache (contract.unbounded)' * is_moved}"
            )
    return listed


def is_quantized(cache: KVCache) -> bool:
    """Return whether an instance stores keys or values in a quantized format."""
    return any(store.formats.are_quantized for store in cache.stores)


def list_seen(keys: Keys, heads: int, end: int) -> Tensor:
    """Return the mask [H, T] of the tokens that gather() lists for the last of `end` tokens. Checks that it may."""
    positions = keys[2]
    listed = torch.zeros(heads, end, dtype=torch.bool)
    for head in range(heads):
        of_head = positions if positions.dim() == 1 else positions[:, head]
        at = of_head[of_head >= 0].long()
        assert at.tolist() == sorted({*at.tolist()}), f"gather(): positions do not ascend: {at.tolist()}"
        assert len(at), "gather() lists no key"
        assert at[-1] == end - 1, f"gather(): the last token, at {end - 1}, does not see itself"
        listed[head, at] = True
    return listed


def place_keys(spec: LayerSpec, k: Tensor, seen: Tensor, shift: int) -> Tensor:
    """Return a text's keys k [T,H,D] in float64, rotated to their positions in a cache that counts these itself.

    The last key is at the position of its token, which is higher by `shift` than that in the text; of the others that
    are `seen` [H, T] each is one position below the next.
    """
    after = seen.flip(1).cumsum(1).flip(1)  # how many are seen from a token on, itself included
    position = len(k) + shift - after
    moved = torch.where(seen, position - torch.arange(len(k)), 0)
    heads = [turn(spec, k[:, head : head + 1].double(), moved[head]) for head in range(len(seen))]
    return torch.cat(heads, 1)


def replace_kept(k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a text with those that gather() returned in their places, float64."""
    k, v = k.double(), v.double()
    kept_k, kept_v, positions = keys
    by_head = positions.view(len(positions), -1).expand(-1, k.shape[1])
    for head in range(k.shape[1]):
        is_kept = by_head[:, head] >= 0
        at = by_head[is_kept, head].long()
        k[at, head], v[at, head] = kept_k[is_kept, head].double(), kept_v[is_kept, head].double()
    return k, v


def check_outs(out: Tensor, wanted: Tensor, where: str) -> None:
    """Assert that attention's output equals the reference, which is in float64."""
    assert not out.isnan().any(), f"{where}: attention is NaN, so memory was read that was never written"
    error = float((out.double() - wanted).abs().max())
    assert error < TOLERANCE[out.dtype], f"{where}: attention differs by {error:.2g} from the reference"


def check_last_queries(
    result: StepOutputs, rows: Sequence[tuple[Reading, int]], layers: Sequence[LayerSpec]
) -> list[list[Tensor]]:
    """Check that the last query of each row attends to the keys that gather() lists.

    These are those of the text; an instance that is not exact may have rounded them, and one that is `unbounded` has
    rotated them to positions within the cache. Return the masks [H, T] of the listed keys, by row and layer.
    """
    masks: list[list[Tensor]] = []
    for i, ((reading, n), start, shift) in enumerate(zip(rows, result.starts, result.shifts, strict=True)):
        masks.append([])
        for layer, keys in enumerate(result.keys[i]):
            end = start + n
            q, k, v = (part[layer][:end] for part in (reading.text.q, reading.text.k, reading.text.v))
            q = turn(layers[layer], q[-1:], torch.tensor([shift]))
            contract = reading.cache.contract
            if contract.unbounded:
                k = place_keys(layers[layer], k, list_seen(keys, k.shape[1], end), shift)
            rounding = 0.0 if contract.exact else ROUNDING
            listed = check_keys(k, v, keys, rounding=rounding, is_moved=contract.unbounded)
            wanted = attention(q, *replace_kept(k, v, keys), layers[layer], listed[:, None])
            window = layers[layer].window
            of_window = "" if window is None else f", whose own window is {window} tokens"
            where = f"layer {layer}{of_window}, position {end - 1}, row of {n}"
            check_outs(result.outs[i][layer][-1:], wanted, where)
            masks[-1].append(listed)
    return masks
