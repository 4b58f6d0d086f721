"""hooked: a strategy that keeps every token, and computes the attention of every second layer itself, in plain torch.

The other layers have addresses. Keys of all layers are in one block of a sequence, at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, Locations, Rows
from cache_strategies.block_table import TableOptions
from cache_strategies.single_block import SingleBlockCache, SingleBlockSequence
from cache_strategies.types import KEEPS_EVERYTHING, Geometry
from kernels.ops import QueryTap
from kernels.types import LayerSpec


class HookedOptions(TableOptions):
    """Options of a HookedCache."""

    layers: Literal["odd", "even", "all"] = Field("odd", description="the layers that the strategy computes itself")


class HookedCache(SingleBlockCache[SingleBlockSequence]):
    """A cache with one block per sequence, which computes every second layer itself.

    In the other layers it takes a copy of the last query of each row.
    """

    interface_version = 3
    options_type = HookedOptions

    def __init__(self, setup: CacheSetup, options: HookedOptions) -> None:
        super().__init__(setup, options)
        self.layers = range(len(setup.geometry.layers))
        self._computed = {i for i in self.layers if options.layers in ("all", ("even", "odd")[i % 2])}
        # Each query is computed alone, from copies of its keys: its bits do not depend on its row.
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.is_quantized)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1

    def computes(self, layer: int) -> bool:
        """Return whether the strategy computes a layer itself."""
        return layer in self._computed

    def locate(self, rows: Rows[SingleBlockSequence]) -> Locations:
        self._whole = super().locate(rows).by_layer
        shown = [None if self.computes(i) else self._whole[i] for i in self.layers]
        return Locations(shown, make_tap_of_last_tokens(self.setup, rows, [each is not None for each in shown]))

    def attend(self, layer: int, rows: Rows[SingleBlockSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        ops, spec, location = self.setup.ops, self.setup.geometry.layers[layer], self._whole[layer]
        assert location is not None
        store, at, _ = location
        ops.write_kv(store, layer, k, v, at)
        token = 0
        for i, sequence in enumerate(rows.sequences):
            end = rows.end(i)
            keys, values = ops.gather(store, layer, at, i, torch.arange(end, device=k.device))
            for position in range(sequence.length, end):
                first = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = slice(first, position + 1)
                out[token] = attend_from_one(q[token], keys[seen].clone(), values[seen].clone(), spec)
                token += 1


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


def make_tap_of_last_tokens(setup: CacheSetup, rows: Rows[Any], in_layer: Sequence[bool]) -> QueryTap:
    """Return a request for the query of each row's last token, in the layers that `in_layer` says."""
    device, dtype = setup.memory.device, setup.geometry.kv_dtype
    last = torch.tensor(rows.counts, device=device).cumsum(0) - 1
    queries = [
        torch.empty(len(rows), spec.num_q_heads, spec.head_dim, dtype=dtype, device=device) if wanted else None
        for spec, wanted in zip(setup.geometry.layers, in_layer, strict=True)
    ]
    return QueryTap(last, queries)
