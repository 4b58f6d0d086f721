"""hooked: a strategy that keeps every token, and computes the attention of every second layer itself, in plain torch.

The other layers have addresses. Keys of all layers are in one block of a sequence, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, Plan, Row
from cache_strategies.block_table import TableOptions, TablePlan, TableSeat
from cache_strategies.single_block import SingleBlockCache
from cache_strategies.types import KEEPS_EVERYTHING, Geometry
from kernels.ops import KVLocation, QueryTap
from kernels.types import LayerSpec


class HookedOptions(TableOptions):
    """Options of a HookedCache."""

    layers: Literal["odd", "even", "all"] = Field("odd", description="the layers that the strategy computes itself")


class HookedPlan(Plan[TableSeat]):
    """A plan with addresses in some layers only; in these it takes a copy of the last query of each row."""

    def __init__(self, cache: HookedCache, rows: Sequence[Row[TableSeat]]) -> None:
        self.rows = rows
        self._cache = cache
        self._whole = TablePlan(cache, rows, cache.table.make_slots(rows))
        self.query_tap = make_tap_of_last_tokens(cache.setup, rows, [not cache.computes(i) for i in cache.layers])

    def kv_location(self, layer_idx: int) -> KVLocation | None:
        return None if self._cache.computes(layer_idx) else self._whole.kv_location(layer_idx)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        ops, spec = self._cache.setup.ops, self._cache.setup.geometry.layers[layer_idx]
        store, at, _ = self._whole.kv_location(layer_idx)
        ops.write_kv(store, layer_idx, k, v, at)
        token = 0
        for i, (seat, num_tokens) in enumerate(self.rows):
            length = seat.length + num_tokens
            keys, values = ops.gather(store, layer_idx, at, i, torch.arange(length, device=k.device))
            for position in range(seat.length, length):
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = slice(first, position + 1)
                out[token] = attend_from_one(q[token], keys[seen].clone(), values[seen].clone(), spec)
                token += 1

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._whole.gather_kv(layer_idx, row)


class HookedCache(SingleBlockCache[TableSeat]):
    """A cache with one block per seat, which computes every second layer itself."""

    interface_version = 2
    options_type = HookedOptions
    seat_type = TableSeat

    def __init__(self, setup: CacheSetup, options: HookedOptions) -> None:
        super().__init__(setup, options)
        self.layers = range(len(setup.geometry.layers))
        self._computed = {i for i in self.layers if options.layers in ("all", ("even", "odd")[i % 2])}
        # Each query is computed alone, from copies of its keys: its bits do not depend on its row.
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.is_quantized)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1

    def computes(self, layer_idx: int) -> bool:
        """Return whether the strategy computes a layer itself."""
        return layer_idx in self._computed

    def plan(self, rows: Sequence[Row[TableSeat]]) -> HookedPlan:
        return HookedPlan(self, rows)


def attend_from_one(q: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec) -> Tensor:
    """Return the attention of one query q [Hq,D] over keys [S,H,D] and values [S,H,Dv], [Hq,Dv], all of them seen."""
    S, H, _ = keys.shape
    query = (q.float() * spec.scale).view(H, spec.num_q_heads // H, -1)
    scores = torch.einsum("hgd,shd->hgs", query, keys.float())
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.sink_logits is not None:
        scores = torch.cat((scores, spec.sink_logits.float().view(H, -1, 1)), 2)
    weights = scores.softmax(2)[..., :S]
    return torch.einsum("hgs,shd->hgd", weights, values.float()).flatten(0, 1).to(q.dtype)


def make_tap_of_last_tokens(setup: CacheSetup, rows: Sequence[Row[Any]], in_layer: Sequence[bool]) -> QueryTap:
    """Return a request for the query of each row's last token, in the layers that `in_layer` says."""
    device, dtype = setup.memory.device, setup.geometry.kv_dtype
    last = torch.tensor([row.num_tokens for row in rows], device=device).cumsum(0) - 1
    queries = [
        torch.empty(len(rows), spec.num_q_heads, spec.head_dim, dtype=dtype, device=device) if wanted else None
        for spec, wanted in zip(setup.geometry.layers, in_layer, strict=True)
    ]
    return QueryTap(last, queries)
