"""All layers of a model as the C++ takes them, for a step in one call. What it does there stands in decoder_forward.h.

Knows which layers and which steps it can take; the others go the way of kernels/composite.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.packed import PackedMatrix
from kernels.ops import DecoderLayer, DecoderLayers, GatedMLP, Stored
from kernels.store import KVStore

MAX_DIM = 256  # of a head; online_softmax.h
EVERYTHING = 1 << 40  # positions: no window
PARTS = ("qkv_proj_rope", "write_kv", "attend", "o_proj_add_norm", "mlp")  # decoder_forward.h; rope is in the second


class CpuDecoderLayers(DecoderLayers):
    """Layers with packed weights, dense or gated by SiLU; all others are refused by `takes`."""

    def __init__(self, layers: Sequence[DecoderLayer], dtype: torch.dtype, library: Any) -> None:
        """Pack the layers for C++; `library` is a namespace of torch.classes."""
        super().__init__(layers)
        self._library = library
        self._layers = library.Layers(torch.empty(0, dtype=dtype))
        for layer in layers:
            self._add(layer)
        self._planes: WeakKeyDictionary[KVStore, Any] = WeakKeyDictionary()

    @staticmethod
    def takes(layer: DecoderLayer) -> bool:
        around, fed, spec = layer.attention, layer.mlp, layer.spec
        if not isinstance(fed, GatedMLP) or fed.activation != "silu":
            return False
        packed = all(isinstance(weight, PackedMatrix) for weight in (around.qkv, around.o, fed.gate_up, fed.down))
        return packed and spec.head_dim == spec.v_head_dim <= MAX_DIM

    def _add(self, layer: DecoderLayer) -> None:
        around, fed, spec = layer.attention, layer.mlp, layer.spec
        assert isinstance(fed, GatedMLP)
        tensors = {
            "norm": around.norm,
            "qkv_bias": around.qkv_bias,
            "o_bias": around.o_bias,
            "post_norm": around.post_norm,
            "next_norm": around.next_norm,
            "gate_up_bias": fed.gate_up_bias,
            "down_bias": fed.down_bias,
            "feed_norm": layer.post_norm,
            "sink_logits": spec.sink_logits,
        }
        for names, pair in ((("q_norm", "k_norm"), around.qk_norm), (("cos", "sin"), around.tables)):
            tensors |= zip(names, pair or (), strict=False)
        weights = [w for w in (around.qkv, around.o, fed.gate_up, fed.down) if isinstance(w, PackedMatrix)]
        self._layers.add(
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            [list(weight.parts) for weight in weights],
            [list(weight.layout) for weight in weights],
            [spec.num_q_heads, spec.num_kv_heads, spec.head_dim, EVERYTHING if spec.window is None else spec.window],
            [around.eps, spec.scale, spec.softcap or 0.0],
        )

    def run(self, x: Tensor, positions: Tensor, stored: Sequence[tuple[slice, Stored]]) -> Tensor:
        """Run all layers on x [N, d] -> [N, d]."""
        addresses, numbers = [], []
        for tokens, (_, at, window) in stored:
            addresses += [at.table, at.row_seat, at.q_start, at.start]
            numbers += [at.block_size, at.sinks, at.ring, EVERYTHING if window is None else window, tokens.start]
        planes = [self._planes_of(where.store) for _, where in stored]
        after: Tensor = self._layers.run(x, positions, planes, addresses, numbers)
        return after

    def op_seconds(self) -> Mapping[str, float] | None:
        return dict(zip(PARTS, self._layers.seconds(), strict=True))

    def _planes_of(self, store: KVStore) -> Any:
        if store not in self._planes:
            layers = range(len(self.layers))
            self._planes[store] = self._library.Planes([store.k(i) for i in layers], [store.v(i) for i in layers])
        return self._planes[store]
