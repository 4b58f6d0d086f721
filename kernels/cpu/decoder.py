"""Passes all layers of a model to C++, which runs a step in one call (decoder_forward.h).

Knows which layers C++ can run; kernels/composite.py runs the others operation by operation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.cpu.packed import PackedMatrix
from kernels.ops import Attention, AttentionSlice, DecoderLayer, DecoderLayers, GatedMLP
from kernels.store import KVStore

MAX_DIM = 256  # of a head; online_softmax.h
NO_WINDOW = 1 << 40  # positions: no window
# Names of operations in the order of the enum TimedOp in decoder_forward.h, where RoPE is a part of "write_kv".
TIMED_OPS = ("qkv_proj_rope", "write_kv", "attend", "o_proj_add_norm", "mlp")


class CpuDecoderLayers(DecoderLayers):
    """Layers that C++ runs in one call: with packed weights, and a dense, gated feed-forward (`supports`)."""

    def __init__(self, layers: Sequence[DecoderLayer], dtype: torch.dtype, library: Any) -> None:
        """Pass the layers to C++, for activations of `dtype`; `library` is a namespace of torch.classes."""
        super().__init__(layers)
        self._library = library
        self._layers = library.Layers(torch.empty(0, dtype=dtype))
        for layer in layers:
            self._add(layer)
        self._planes: WeakKeyDictionary[KVStore, Any] = WeakKeyDictionary()
        self._hook_seconds = 0.0  # seconds of the last step in which strategies computed their own attention

    @staticmethod
    def supports(layer: DecoderLayer) -> bool:
        """Return whether C++ can run a layer: with packed weights, and a dense feed-forward gated by SiLU or GELU."""
        attn, mlp, spec = layer.attention, layer.mlp, layer.spec
        if not isinstance(mlp, GatedMLP):
            return False
        packed = all(isinstance(weight, PackedMatrix) for weight in (attn.qkv, attn.o, mlp.gate_up, mlp.down))
        return packed and spec.head_dim == spec.v_head_dim <= MAX_DIM

    def _add(self, layer: DecoderLayer) -> None:
        attn, mlp, spec = layer.attention, layer.mlp, layer.spec
        assert isinstance(mlp, GatedMLP)
        tensors = {
            "norm": attn.norm,
            "qkv_bias": attn.qkv_bias,
            "o_bias": attn.o_bias,
            "post_norm": attn.post_norm,
            "next_norm": attn.next_norm,
            "gate_up_bias": mlp.gate_up_bias,
            "down_bias": mlp.down_bias,
            "mlp_post_norm": layer.post_norm,
            "sink_logits": spec.sink_logits,
        }
        for names, pair in ((("q_norm", "k_norm"), attn.qk_norm), (("cos", "sin"), attn.tables)):
            tensors |= zip(names, pair or (), strict=False)
        weights = [w for w in (attn.qkv, attn.o, mlp.gate_up, mlp.down) if isinstance(w, PackedMatrix)]
        self._layers.add(
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            [list(weight.tensors) for weight in weights],
            [list(weight.layout) for weight in weights],
            [
                *(spec.num_q_heads, spec.num_kv_heads, spec.head_dim),
                *(NO_WINDOW if spec.window is None else spec.window, int(mlp.activation == "gelu_tanh")),
            ],
            [attn.eps, spec.scale, spec.softcap or 0.0],
        )

    def run(self, x: Tensor, attention: Attention) -> Tensor:
        """Return the output [N, d] of the last layer for embedded tokens x [N, d].

        C++ stops at each layer in which a slice computes its own attention (a hook), and is resumed after it.
        """
        out, hooked_layer = self._layers.run(x, attention.positions, *self._make_arguments(attention.slices))
        self._hook_seconds = 0.0
        while hooked_layer >= 0:
            began = time.perf_counter()
            for i, each in enumerate(attention.slices):
                if each.kv_locations[hooked_layer] is None:
                    assert each.hook is not None, "a slice without a location needs a hook"
                    each.hook(hooked_layer, *self._layers.hook_tensors(i))
            self._hook_seconds += time.perf_counter() - began
            hooked_layer = self._layers.resume()
        return cast(Tensor, out)

    def _make_arguments(self, slices: Sequence[AttentionSlice]) -> tuple[list[Any], ...]:
        """Return the fields of the struct StepArguments of decoder.cpp."""
        # Many layers have the same location, which is passed once.
        unique = {id(where): where for each in slices for where in each.kv_locations if where is not None}
        numbers = {key: i for i, key in enumerate(unique)}
        planes, addresses, integers = [], [], []
        for store, at, window in unique.values():
            planes.append(self._get_planes(store))
            addresses += [at.table, at.table_row, at.q_start, at.start, at.window_start]
            integers += [at.block_size, at.sinks, at.ring, at.num_decode, at.max_q, at.max_kv]
            integers.append(NO_WINDOW if window is None else window)
        locations = [numbers.get(id(where), -1) for each in slices for where in each.kv_locations]
        taps: list[Tensor | None] = []
        if any(each.query_tap is not None for each in slices):
            nothing = [None] * (1 + len(self.layers))
            for each in slices:
                taps += nothing if each.query_tap is None else [each.query_tap.tokens, *each.query_tap.queries]
        return planes, addresses, integers, [each.tokens.start for each in slices], locations, taps

    def op_seconds(self) -> Mapping[str, float] | None:
        seconds = dict(zip(TIMED_OPS, self._layers.seconds(), strict=True))
        seconds["attend"] += self._hook_seconds
        return seconds

    def _get_planes(self, store: KVStore) -> Any:
        if store not in self._planes:
            layers = list(store.layers)
            k, v, centers = ([get(i) for i in layers] for get in (store.k, store.v, store.k_center))
            self._planes[store] = self._library.Planes(k, v, layers, *list_rotations(store), centers)
        return self._planes[store]


def list_rotations(store: KVStore) -> tuple[bool, bool]:
    """Return whether the keys of a store are rotated, and whether its values are."""
    return store.formats.k.rotated, store.formats.v.rotated
