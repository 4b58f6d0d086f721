"""mirrored: a KV cache that keeps a second copy of its keys and values, repeated for the query heads and head-major.

It exists to be compared with strategies whose kernels read grouped heads in place: it shows what a cache costs if
attention is a batched matrix product over dense [heads, tokens, head_dim]. Each layer of a sequence has

    history   K [tokens, H, D], V [tokens, H, Dv]      token by token, H KV heads: what the model computed
    mirror    K [Hq, tokens, D], V [Hq, tokens, Dv]    head-major, each KV head repeated for its Hq / H query heads

A step copies its new tokens into both; the tokens before it are not touched. Attention multiplies by views of the
mirror, without a copy in another order (attention.py says when torch copies 16-bit numbers on a CPU). A layer with as
many KV heads as query heads has nothing to repeat, and no mirror: attention multiplies by the transposed history.

With a batch, the history would be [tokens, batch * H, D] and the mirror [batch * Hq, tokens, D]. Here every sequence
has a block of its own, and is a batch of one sequence: sequences come and go at any time and have different lengths,
and a shared tensor would hold all of them as long as the longest one. The rows of a step are computed one after the
other. A block has room for max_seq_len tokens and holds both copies of all layers:

    block  | layer 0: K history | K mirror | V history | V mirror | layer 1: ... |

So a token takes 1 + Hq / H times the memory that it takes under the other strategies where heads are grouped (Hq > H),
and the same memory elsewhere. All sizes that the cache reports count both copies. A block is filled with zeros before
its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Options, Rows
from cache_strategies.mirrored.attention import attend_to_mirror, first_visible
from cache_strategies.types import KEEPS_EVERYTHING, Blocks, CacheUsage, Geometry, Sizes, Text
from kernels.arguments import check, check_new_tokens
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec


# -------------------------------------------------------------------- memory of a sequence
class LayerHistory(NamedTuple):
    """One layer's keys and values of a sequence, as views of its block with room for P tokens.

    If heads are not grouped, the mirrors are views of the history.
    """

    k: Tensor  # [P, H, D]
    v: Tensor  # [P, H, Dv]
    k_mirror: Tensor  # [Hq, P, D]
    v_mirror: Tensor  # [Hq, P, Dv]
    is_mirrored: bool  # whether the mirrors are a second copy


def is_grouped(spec: LayerSpec) -> bool:
    """Return whether query heads share KV heads: only such a layer has a mirror."""
    return spec.num_q_heads > spec.num_kv_heads


def _add_mirrors(geometry: Geometry) -> list[LayerSpec]:
    """Return the layers with H + Hq KV heads where heads are grouped: a block of them has the size of both copies."""
    return [
        spec._replace(num_kv_heads=spec.num_kv_heads + spec.num_q_heads) if is_grouped(spec) else spec
        for spec in geometry.layers
    ]


def _compute_bytes(geometry: Geometry) -> int:
    """Return the bytes of a sequence's block."""
    return compute_block_bytes(_add_mirrors(geometry), geometry.max_seq_len, geometry.kv_dtype)


def _view_plane(plane: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """View the keys or values [H + Hq or H, P, D] of a block as (history [P, H, D], head-major [Hq, P, D])."""
    total, tokens, dim = plane.shape
    assert plane.is_contiguous()
    history = plane[:heads].view(tokens, heads, dim)
    assert history.stride() == (heads * dim, dim, 1)
    if total == heads:
        return history, history.transpose(0, 1)
    mirror = plane[heads:]
    assert mirror.shape == (total - heads, tokens, dim)
    assert mirror.stride() == (tokens * dim, dim, 1)
    return history, mirror


def _view_layers(store: KVStore, block: int, layers: Sequence[LayerSpec]) -> list[LayerHistory]:
    """View a block of a store of layers with their mirrors as the histories and mirrors of `layers`."""
    views = []
    for i, spec in enumerate(layers):
        k, k_mirror = _view_plane(store.k(i)[block], spec.num_kv_heads)
        v, v_mirror = _view_plane(store.v(i)[block], spec.num_kv_heads)
        views.append(LayerHistory(k, v, k_mirror, v_mirror, is_grouped(spec)))
    return views


class MirroredSequence(KVSequence):
    """A sequence with one block, and the views of its histories and mirrors by layer."""

    def __init__(self, cache: MirroredCache, block: int, layers: Sequence[LayerHistory], length: int = 0) -> None:
        self.length = self.found = length
        self.miss = "bypass"
        self.room = cache.setup.geometry.max_seq_len
        self.block = block
        self.layers = layers
        self.is_zeroed = False  # whether what an earlier sequence left in the block was overwritten with zeros
        self._cache = cache

    def reserve(self, num_tokens: int) -> bool:
        assert self.length + num_tokens <= self._cache.setup.geometry.max_seq_len
        return True

    def commit(self, ids: Sequence[int]) -> None:
        self.length += len(ids)

    def fork(self) -> MirroredSequence | None:
        return self._cache.copy(self)

    def close(self) -> None:
        self._cache.remove(self)

    def append(self, layer_idx: int, k: Tensor, v: Tensor, setup: CacheSetup) -> None:
        """Write k [n,H,D] and v [n,H,Dv] after the committed tokens, to the history and to the mirror.

        Raises ValueError, and writes nothing, if they have another shape or dtype or do not fit into the block.
        """
        layer, start = self.layers[layer_idx], self.length
        check_new_tokens(k, v, layer.k.shape[1:], layer.v.shape[1:])
        end = start + len(k)
        check(k.dtype is layer.k.dtype, "append: k and v must be {}, and are {}", layer.k.dtype, k.dtype)
        check(end <= len(layer.k), "append: there is room for {} tokens, not for {}", len(layer.k), end)
        layer.k[start:end] = k
        layer.v[start:end] = v
        if layer.is_mirrored:
            setup.ops.repeat_kv_heads_step(layer.k_mirror, k, start)
            setup.ops.repeat_kv_heads_step(layer.v_mirror, v, start)

    def gather_cache_history(self, layer_idx: int, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Return K [steps, H, D] and V [steps, H, Dv] of the first tokens, as views; by default the committed ones."""
        steps = self.length if steps is None else steps
        layer = self.layers[layer_idx]
        return layer.k[:steps], layer.v[:steps]

    def gather_repeated_cache_history(self, layer_idx: int, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Return K [Hq, steps, D] and V [Hq, steps, Dv] of the same tokens, head-major, as views."""
        steps = self.length if steps is None else steps
        layer = self.layers[layer_idx]
        k, v = layer.k_mirror[:, :steps], layer.v_mirror[:, :steps]
        assert (k.shape[1], v.shape[1]) == (steps, steps)
        assert k.stride() == layer.k_mirror.stride()
        assert v.stride() == layer.v_mirror.stride()
        return k, v


class MirroredCache(KVCache[MirroredSequence]):
    """A cache with one block of max_seq_len tokens per sequence, which holds a history and its repeated mirror."""

    options_type = Options

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        super().__init__(setup, options)
        geometry = setup.geometry
        # `stores` stays empty, as its addresses would not be those of the model's layers
        self._region = setup.memory.region(_compute_bytes(geometry), "histories and mirrors")
        self._memory = KVStore(self._region, _add_mirrors(geometry), geometry.max_seq_len, geometry.kv_dtype)
        self.sequences: set[MirroredSequence] = set()
        # The keys do not depend on how tokens were split into rows, but attention does: torch sums a product in another
        # order if the number of queries differs. False keeps drafts from changing a text by that.
        self.contract = KEEPS_EVERYTHING._replace(chunk_invariant=False)

    # ---------------------------------------------------------------- memory
    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        return Sizes([_compute_bytes(geometry)], lambda num_tokens: [1])

    def usage(self) -> CacheUsage:
        tokens = sum(sequence.length for sequence in self.sequences)
        reserved = len(self.sequences) * self._region.size
        used = tokens * self._memory.block_bytes // self._memory.block_size
        return CacheUsage(
            len(self.sequences), tokens, reserved, used, 0, reserved - used, self.setup.memory.limit_bytes
        )

    def blocks(self) -> Blocks:
        return Blocks(in_use=len(self.sequences))

    # ---------------------------------------------------------------- sequences
    def open(self, text: Text) -> MirroredSequence | None:
        return self._allocate_sequence(length=0)

    def _allocate_sequence(self, length: int) -> MirroredSequence | None:
        """Return a sequence of `length` tokens with a newly allocated block; None if there is not enough memory."""
        if len(self.sequences) == self.setup.geometry.max_seats or (blocks := self._region.allocate()) is None:
            return None
        layers = _view_layers(self._memory, blocks[0], self.setup.geometry.layers)
        opened = MirroredSequence(self, blocks[0], layers, length)
        self.sequences.add(opened)
        return opened

    def copy(self, sequence: MirroredSequence) -> MirroredSequence | None:
        """Return a copy of a sequence in a block of its own; None if there is not enough memory."""
        child = self._allocate_sequence(sequence.length)
        if child is not None:
            child.found, child.is_zeroed = sequence.found, sequence.is_zeroed
            self.setup.ops.copy_blocks(self._memory, [sequence.block], [child.block])
        return child

    def remove(self, sequence: MirroredSequence) -> None:
        """Free the block of a sequence."""
        self.sequences.remove(sequence)
        self._region.release([sequence.block])

    # ---------------------------------------------------------------- steps
    def locate(self, rows: Rows[MirroredSequence]) -> Locations:
        for each in rows.sequences:
            if not each.is_zeroed:
                self._memory.blocks[each.block].zero_()
                each.is_zeroed = True
        return Locations([None] * len(self.setup.geometry.layers))

    def attend(self, layer: int, rows: Rows[MirroredSequence], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write both copies and attend to the mirrors, one row after the other."""
        spec, first = self.setup.geometry.layers[layer], 0
        for each, num_tokens in zip(rows.sequences, rows.counts, strict=True):
            tokens = slice(first, first := first + num_tokens)
            each.append(layer, k[tokens], v[tokens], self.setup)
            keys, values = each.gather_repeated_cache_history(layer, each.length + num_tokens)
            attend_to_mirror(out[tokens], q[tokens], keys, values, spec)

    def gather(self, layer: int, rows: Rows[MirroredSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        end = rows.end(row)
        k, v = rows.sequences[row].gather_cache_history(layer, end)
        start = first_visible(end - 1, self.setup.geometry.layers[layer])
        return k[start:].clone(), v[start:].clone(), torch.arange(start, end, device=k.device)

    def check_integrity(self) -> None:
        blocks = [sequence.block for sequence in self.sequences]
        assert len(set(blocks)) == len(blocks) <= self.setup.geometry.max_seats
        assert self._region.num_held == len(blocks)
        for sequence in self.sequences:
            assert 0 <= sequence.length <= self.setup.geometry.max_seq_len
            assert sequence.is_zeroed or sequence.length == 0
