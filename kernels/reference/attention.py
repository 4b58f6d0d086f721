"""Attention in plain torch: keys are read tile by tile into scratch memory of fixed size.

No tensor of keys, values or scores grows with the context; only the indices of the tiles do, which all layers of a step
share. A tile covers TILE tokens counted by their indices from 0, so the order of summation depends on indices alone,
and not on where the keys are stored. So strategies that keep the same keys give results with the same bits. Knows no
strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.arguments import by_head
from kernels.kv_formats import Plane, hadamard
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots

TILE = 128  # tokens


@dataclass(frozen=True)
class _Tile:
    """TILE tokens of some rows: the addresses of their keys, and which queries see them; h is 1 if heads are alike."""

    block: Tensor  # [B, h, TILE] int64
    slot: Tensor  # [B, h, TILE] int64, slot of each key within its block
    # [B, h, n, TILE] bool, True where a query does not see a key; None: every query sees every key
    hidden_mask: Tensor | None


@dataclass(frozen=True)
class _Group:
    """Rows with equal numbers of tokens that are computed together: all decode rows, or one chunk of a prompt."""

    tokens: Tensor | slice  # indices of the group's tokens among the N tokens of the step
    rows: int  # number of rows, B
    queries: int  # number of queries per row, n
    tiles: list[_Tile]


class TiledAttention:
    """Computes `Ops.attend`. Keeps scratch memory and, for a step, the indices of tiles, which all layers share."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self._groups: WeakKeyDictionary[Slots, dict[tuple[int | None, ...], list[_Group]]] = WeakKeyDictionary()

    def forget(self, at: Slots) -> None:
        """Forget the indices that were computed from these addresses."""
        self._groups.pop(at, None)

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        at: Slots,
        spec: LayerSpec,
        window: int | None,
        lse: Tensor | None = None,
    ) -> None:
        """Compute `Ops.attend`; the arguments must have been checked."""
        by_window = self._groups.setdefault(at, {})
        key = (spec.window, window)
        if key not in by_window:
            by_window[key] = list(_iter_groups(at, spec.window, window))
        for group in by_window[key]:
            self._attend_group(out, q, store, layer, group, spec, lse)

    def _attend_group(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        group: _Group,
        spec: LayerSpec,
        lse: Tensor | None,
    ) -> None:
        """Attend from a group's tokens by online softmax (Milakov & Gimelshein 2018)."""
        B, n, H, Dv = group.rows, group.queries, spec.num_kv_heads, spec.v_head_dim
        G = spec.num_q_heads // H  # number of query heads that share a KV head

        def by_token(x: Tensor) -> Tensor:
            """Return x [B*H, n*G, D] as [B*n, Hq, D]."""
            return x.view(B, H, n, G, -1).transpose(1, 2).reshape(B * n, H * G, -1)

        k_plane, v_plane = store.planes(layer)
        # q becomes [B*H, n*G, D]: the queries of a KV head are side by side, so that its keys are read once.
        q = q[group.tokens].view(B, n, H, G, -1).transpose(1, 2).reshape(B * H, n * G, -1).float()
        q = (hadamard(q) if k_plane.format.rotated else q) * spec.scale
        top = q.new_full((B * H, n * G, 1), -torch.inf)  # running maximum
        total = torch.zeros_like(top)
        acc = q.new_zeros((B * H, n * G, Dv))
        for tile in group.tiles:
            k = self._load_tile("k", k_plane, tile, spec.head_dim)
            scores = torch.bmm(q, k.transpose(1, 2))  # [B*H, n*G, TILE]
            if spec.softcap:
                scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
            v = self._load_tile("v", v_plane, tile, Dv)
            if tile.hidden_mask is not None:
                _move_non_finite_to_scores(v, scores)
                scores.view(B, H, n, G, TILE).masked_fill_(tile.hidden_mask.unsqueeze(3), -torch.inf)
            top, rescale = _raise_maximum(top, scores.amax(-1, keepdim=True))
            p = scores.sub_(top.clamp_min(torch.finfo(torch.float32).min)).exp_()
            total.mul_(rescale).add_(p.sum(-1, keepdim=True))
            acc.mul_(rescale).baddbmm_(p, v)
        if spec.sink_logits is not None:
            sink = spec.sink_logits.float().view(1, H, 1, G).expand(B, H, n, G).reshape(B * H, n * G, 1)
            top, rescale = _raise_maximum(top, sink)
            total.mul_(rescale).add_((sink - top).exp())
            acc.mul_(rescale)
        acc.div_(total)
        out[group.tokens] = by_token(hadamard(acc) if v_plane.format.rotated else acc).to(out.dtype)
        if lse is not None:
            lse[group.tokens] = by_token(top + total.log())[..., 0]

    def _load_tile(self, name: str, plane: Plane, tile: _Tile, dim: int) -> Tensor:
        """Return the stored keys or values of a tile as float32 [B*H, TILE, dim].

        They are in scratch memory unless they are quantized.
        """
        numbers = plane.numbers
        heads = torch.arange(numbers.shape[1], device=numbers.device).view(1, -1, 1)  # split heads: 0 for all of them
        where = tile.block, heads, tile.slot
        if plane.format.is_quantized:
            return plane.select(where).read().view(-1, TILE, dim)
        shape = (len(tile.block), max(numbers.shape[1], tile.block.shape[1]), TILE, dim)
        tile_numbers = self._get_scratch(name, shape, numbers.dtype, numbers.device)
        torch.ops.aten.index.Tensor_out(numbers, list(where), out=tile_numbers)
        if numbers.dtype is not torch.float32:
            tile_numbers = self._get_scratch(name, shape, torch.float32, numbers.device).copy_(tile_numbers)
        return tile_numbers.view(-1, TILE, dim)

    def _get_scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return scratch memory by its name and dtype; it grows to the largest size requested so far."""
        size = torch.Size(shape).numel()
        flat = self._scratch.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self._scratch[name, dtype] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(shape)


def _move_non_finite_to_scores(values: Tensor, scores: Tensor) -> None:
    """Set non-finite numbers in values [B*H, TILE, Dv] to 0, and the scores [B*H, n, TILE] of their keys to NaN.

    The weight 0 of a hidden key would not keep a NaN value out of the sum, as 0 * NaN is NaN. A score can be masked, so
    only queries that see the key get NaN.
    """
    scores.add_(values.mul(0.0).sum(-1).unsqueeze(1))  # 0 or NaN
    values.nan_to_num_(0.0, 0.0, 0.0)


def _raise_maximum(top: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the higher of two maxima, the factor that makes sums relative to `top` relative to this higher one).

    The factor is 1 while both are -inf.
    """
    higher = torch.maximum(top, new)
    return higher, (top - higher).nan_to_num_(nan=0.0).exp_()


# -------------------------------------------------------------------- indices, once per step
@dataclass(frozen=True)
class _Queries:
    """The queries of a group of rows of n tokens: what they may see is in terms of the indices of tokens."""

    table_row: Tensor  # [B, h] row of the block table
    index: Tensor  # [B, h, n]
    first: Tensor  # [B, h, n], the oldest token in the model's window


def _iter_groups(at: Slots, model_window: int | None, window: int | None) -> Iterator[_Group]:
    """Yield a group of all decode rows, then a group for each chunk of a prompt; padding rows are left out."""
    start, q_start = by_head(at.start)[:, 0].tolist(), at.q_start.tolist()
    decode = [b for b in range(at.num_decode) if start[b] >= 0]
    groups = [decode] if decode else []
    groups += [[b] for b in range(at.num_decode, at.num_rows) if start[b] >= 0]
    for rows in groups:
        token, n = q_start[rows[0]], q_start[rows[0] + 1] - q_start[rows[0]]
        dense = rows == list(range(rows[0], rows[-1] + 1))
        tokens = slice(token, token + len(rows) * n) if dense else torch.tensor([q_start[b] for b in rows])
        queries = _find_queries(at, rows, n, tokens, model_window)
        tiles = [_make_tile(at, queries, first, window) for first in _list_tile_starts(queries, at.sinks, window)]
        yield _Group(tokens, len(rows), n, tiles)


def _find_queries(at: Slots, rows: list[int], n: int, tokens: Tensor | slice, model_window: int | None) -> _Queries:
    """Return the queries of `rows`, which have n tokens each: `tokens` of the step."""
    which = torch.tensor(rows, device=at.start.device)
    index = by_head(at.start)[which][..., None] + torch.arange(n, device=which.device)  # [B, h, n]
    if at.window_start is not None and model_window is not None:
        first = by_head(at.window_start)[tokens].unflatten(0, (len(rows), n)).transpose(1, 2)
    else:
        first = index - index if model_window is None else (index - model_window + 1).clamp_min(0)
    return _Queries(by_head(at.table_row)[which], index, first)


def _list_tile_starts(queries: _Queries, sinks: int, window: int | None) -> list[int]:
    """Return, in ascending order, the first indices of the tiles that some of the queries may see."""
    oldest, first, end = int(queries.first.min()), int(queries.index.min()), int(queries.index.max()) + 1
    latest = oldest if window is None else max(oldest, first - window + 1)
    starts = set(range(latest // TILE * TILE, end, TILE))
    if window is not None and oldest < sinks:
        starts |= set(range(0, min(sinks, end), TILE))
    return sorted(starts)


def _make_tile(at: Slots, queries: _Queries, first: int, window: int | None) -> _Tile:
    """Return the tile of the tokens with indices first .. first + TILE - 1."""
    key = torch.arange(first, first + TILE, device=queries.index.device)
    # Tokens that no query of a row sees may have no memory; instead of them one that is seen is read, and masked.
    readable = key.maximum(queries.first[..., :1]).minimum(queries.index[..., -1:])  # [B, h, TILE]
    block, slot = at.locate(queries.table_row[..., None], readable)
    query, oldest = queries.index[..., None], queries.first[..., None]  # [B, h, n, 1]
    visible = (key <= query) & (key >= oldest)
    if window is not None:
        visible &= (query - key < window) | (key < at.sinks)
    return _Tile(block, slot, None if bool(visible.all()) else ~visible)
