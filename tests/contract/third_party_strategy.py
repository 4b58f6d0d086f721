"""A strategy as a third party might write it: lossy, from the interface alone, with memory of its own.

It keeps every second token and the latest one, in lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, Options, Plan, Row, Seat
from cache_strategies.types import NO_SALT, CacheUsage, Contract, Geometry, Salt, Sizes
from kernels.types import LayerSpec

Keys = tuple[Tensor, Tensor, Tensor]  # K [S,H,D], V [S,H,Dv], positions [S]


class SieveOptions(Options):
    """Options of a SieveCache."""

    keep: int = Field(2, ge=1, description="every how manieth token stays")


class SieveSeat(Seat):
    """A seat with the K and V of each layer in tensors of its own."""

    __slots__ = ("layers",)

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = layers


class SievePlan(Plan):
    """A plan that first drops the keys of a failed attempt, so that attend() can be repeated."""

    def __init__(self, cache: SieveCache, rows: Sequence[Row]) -> None:
        self.rows = rows  # those that pad come after them, and are left alone
        self._cache = cache

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        spec = self._cache.setup.geometry.layers[layer_idx]
        first = 0
        for i, row in enumerate(self.rows):
            tokens = slice(first, first := first + row.num_tokens)
            self._enter(row, layer_idx, k[tokens], v[tokens])
            for n in range(row.num_tokens):
                keys, values, _ = self._seen(layer_idx, i, row.seat.length + n)
                group = spec.num_q_heads // spec.num_kv_heads
                query = q[tokens][n].float() * spec.scale
                scores = torch.einsum("hd,shd->hs", query, keys.float().repeat_interleave(group, 1))
                if spec.softcap:
                    scores = torch.tanh(scores / spec.softcap) * spec.softcap
                if spec.sink_logits is not None:
                    scores = torch.cat((scores, spec.sink_logits[:, None].float()), 1)
                weights = scores.softmax(1)[:, : len(keys)]
                out[tokens][n] = torch.einsum("hs,shd->hd", weights, values.float().repeat_interleave(group, 1))

    def gather_kv(self, layer_idx: int, row: int) -> Keys:
        seat, num_tokens = self.rows[row]
        return self._seen(layer_idx, row, seat.length + num_tokens - 1)

    def _enter(self, row: Row, layer: int, k: Tensor, v: Tensor) -> None:
        seat = row.seat
        assert isinstance(seat, SieveSeat)
        old_k, old_v = seat.layers[layer]
        seat.layers[layer] = torch.cat((old_k[: seat.length], k)), torch.cat((old_v[: seat.length], v))

    def _seen(self, layer: int, row: int, position: int) -> Keys:
        seat, window = self.rows[row].seat, self._cache.setup.geometry.layers[layer].window
        assert isinstance(seat, SieveSeat)
        at = torch.arange(position + 1)
        at = at[(at % self._cache.options.keep == 0) | (at == position)]
        at = at if window is None else at[at > position - window]
        k, v = seat.layers[layer]
        return k[at], v[at], at


class SieveCache(KVCache):
    """A cache that keeps every `keep`-th token in memory of its own, outside of the KV memory."""

    interface_version = 2
    options_type = SieveOptions
    plan_type: type[SievePlan] = SievePlan

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        super().__init__(setup, options)
        self.options: Any = options
        self.contract = Contract(
            exact=options == SieveOptions(keep=1),
            forkable=False,
            rewind=None,
            replayable=True,
            chunk_invariant=True,
            max_row=None,
        )
        self.seats: set[SieveSeat] = set()

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        return Sizes()

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> Seat | None:
        seat = SieveSeat([(self._none(s, s.head_dim), self._none(s, s.v_head_dim)) for s in self.setup.geometry.layers])
        self.seats.add(seat)
        return seat

    def _none(self, spec: LayerSpec, dim: int) -> Tensor:
        return torch.empty(0, spec.num_kv_heads, dim, dtype=self.setup.geometry.kv_dtype)

    def grow(self, seat: Seat, num_tokens: int) -> bool:
        return True

    def close(self, seat: Seat) -> None:
        assert isinstance(seat, SieveSeat)
        self.seats.remove(seat)

    def plan(self, rows: Sequence[Row]) -> Plan:
        return self.plan_type(self, rows)

    def count_dropped_tokens(self, seat: Seat) -> int:
        dropped, heads = 0, 0
        for spec in self.setup.geometry.layers:
            window = self.setup.geometry.max_seq_len if spec.window is None else spec.window
            used = range(max(0, seat.length + 1 - window), seat.length)
            dropped += spec.num_kv_heads * sum(1 for position in used if position % self.options.keep)
            heads += spec.num_kv_heads
        return dropped // heads

    def usage(self) -> CacheUsage:
        return CacheUsage(len(self.seats), sum(seat.length for seat in self.seats), 0, 0, 0, 0, 0)

    def check_integrity(self) -> None:
        assert all(seat.length <= self.setup.geometry.max_seq_len for seat in self.seats)
