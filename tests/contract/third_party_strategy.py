"""A strategy as a third party might write it: lossy, from the interface alone, with memory of its own.

It keeps every second token and the latest one, in lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Options, Rows
from cache_strategies.types import Blocks, CacheUsage, Contract, Geometry, Sizes, Text
from kernels.types import LayerSpec

Keys = tuple[Tensor, Tensor, Tensor]  # K [S,H,D], V [S,H,Dv], positions [S]


class SieveOptions(Options):
    """Options of a SieveCache."""

    keep: int = Field(2, ge=1, description="every how manieth token stays")


class SieveSequence(KVSequence):
    """A sequence with the K and V of each layer in tensors of its own."""

    def __init__(self, cache: SieveCache, layers: list[tuple[Tensor, Tensor]]) -> None:
        self._cache = cache
        self.layers = layers

    def reserve(self, num_tokens: int) -> bool:
        return True

    def commit(self, ids: Sequence[int]) -> None:
        self.length += len(ids)

    def close(self) -> None:
        self._cache.sequences.remove(self)


class SieveCache(KVCache[SieveSequence]):
    """A cache that keeps every `keep`-th token in memory of its own, outside of the KV memory."""

    interface_version = 3
    options_type = SieveOptions
    options: SieveOptions

    def __init__(self, setup: CacheSetup, options: SieveOptions) -> None:
        super().__init__(setup, options)
        self.contract = Contract(exact=options.keep == 1)
        self.sequences: set[SieveSequence] = set()

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        return Sizes()

    def open(self, text: Text) -> SieveSequence | None:
        layers = self.setup.geometry.layers
        opened = SieveSequence(self, [(self._none(s, s.head_dim), self._none(s, s.v_head_dim)) for s in layers])
        self.sequences.add(opened)
        return opened

    def _none(self, spec: LayerSpec, dim: int) -> Tensor:
        return torch.empty(0, spec.num_kv_heads, dim, dtype=self.setup.geometry.kv_dtype)

    def locate(self, rows: Rows[SieveSequence]) -> Locations:
        return Locations([None] * len(self.setup.geometry.layers))

    def attend(self, layer: int, rows: Rows[SieveSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend from one token after the other; the keys of a failed attempt are dropped first."""
        spec = self.setup.geometry.layers[layer]
        first = 0
        for sequence, num_tokens in zip(rows.sequences, rows.counts, strict=True):
            tokens = slice(first, first := first + num_tokens)
            self.enter(sequence, layer, k[tokens], v[tokens])
            for n in range(num_tokens):
                keys, values, _ = self._seen(layer, sequence, sequence.length + n)
                group = spec.num_q_heads // spec.num_kv_heads
                query = q[tokens][n].float() * spec.scale
                scores = torch.einsum("hd,shd->hs", query, keys.float().repeat_interleave(group, 1))
                if spec.softcap:
                    scores = torch.tanh(scores / spec.softcap) * spec.softcap
                if spec.sink_logits is not None:
                    scores = torch.cat((scores, spec.sink_logits[:, None].float()), 1)
                weights = scores.softmax(1)[:, : len(keys)]
                out[tokens][n] = torch.einsum("hs,shd->hd", weights, values.float().repeat_interleave(group, 1))

    def enter(self, sequence: SieveSequence, layer: int, k: Tensor, v: Tensor) -> None:
        """Append the keys and values of new tokens to the committed ones."""
        old_k, old_v = (x[: sequence.length] for x in sequence.layers[layer])
        sequence.layers[layer] = torch.cat((old_k, k)), torch.cat((old_v, v))

    def gather(self, layer: int, rows: Rows[SieveSequence], row: int) -> Keys:
        return self._seen(layer, rows.sequences[row], rows.end(row) - 1)

    def _seen(self, layer: int, sequence: SieveSequence, position: int) -> Keys:
        window = self.setup.geometry.layers[layer].window
        at = torch.arange(position + 1)
        at = at[(at % self.options.keep == 0) | (at == position)]
        at = at if window is None else at[at > position - window]
        k, v = sequence.layers[layer]
        return k[at], v[at], at

    def count_visible(self, layer: int, length: int) -> int:
        window = self.setup.geometry.layers[layer].window
        first = 0 if window is None else max(0, length + 1 - window)  # of what the next token uses
        return sum(position % self.options.keep == 0 for position in range(first, length))

    def usage(self) -> CacheUsage:
        return CacheUsage(len(self.sequences), sum(each.length for each in self.sequences), 0, 0, 0, 0, 0)

    def blocks(self) -> Blocks:
        return Blocks()

    def check_integrity(self) -> None:
        assert all(each.length <= self.setup.geometry.max_seq_len for each in self.sequences)
