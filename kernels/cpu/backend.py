"""The backend for CPUs: calls the C++ operations, and the reference where there is none for the arguments.

library.py chooses the instruction set.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kernels.cpu.decoder import MAX_DIM, NO_WINDOW, CpuDecoderLayers, list_rotations
from kernels.cpu.packed import (
    BLOCK,
    JoinedMatrix,
    PackedBlockMatrix,
    PackedFloatMatrix,
    PackedIntMatrix,
    PackedMatrix,
)
from kernels.memory import WeightArena
from kernels.ops import Attention, AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, Weight
from kernels.reference.backend import ReferenceOps, check_attend
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots
from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.quantization import QuantizedTensor, concatenate_quantized
from kernels.weights.stored import ConcatenatedWeight, StoredWeight, concatenate_alike, dequantize_weight

GROUP_MULTIPLE = 32  # C++ requires groups of a multiple of this many columns, or of all columns, of a quantized weight
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that can be packed


class CpuOps(ReferenceOps):
    """Implements `kernels.ops.Ops`; calls the reference for operations, shapes and dtypes that C++ lacks."""

    def __init__(self, library: Any, classes: Any) -> None:
        """Use a loaded library, given its namespaces of torch.ops and of torch.classes."""
        super().__init__()
        self._library = library
        self._classes = classes
        self._memory = WeightArena()  # of packed weights

    @property
    def batch_invariant_head_dim(self) -> int:
        return MAX_DIM

    @property
    def block_formats(self) -> Container[str]:
        return FORMATS

    def pack(self, weight: Weight) -> Weight:
        target = self._library, self._memory
        match weight:
            case BlockTensor():
                return PackedBlockMatrix([weight], *target)
            case QuantizedTensor() if weight.group % GROUP_MULTIPLE == 0 or weight.group == weight.shape[1]:
                return PackedIntMatrix(weight, *target)
            case Tensor() if weight.dtype in FLOATS:
                return PackedFloatMatrix([weight], *target)
            case ConcatenatedWeight(parts=[Tensor(dtype=dtype), *_]) if dtype in FLOATS:
                return PackedFloatMatrix(cast(Sequence[Tensor], weight.parts), *target)
            case ConcatenatedWeight():
                return self._pack_quantized(weight)
        return super().pack(weight)

    def _pack_quantized(self, weight: ConcatenatedWeight) -> Weight:
        """Pack quantized weights that are used as one, each in its format.

        Parts that do not fill blocks of rows become one format that has the values of all, or floats.
        """
        groups = weight.group_by_format()
        if all(sum(part.shape[0] for part in parts) % BLOCK == 0 for parts in groups[:-1]):
            packed = [self._pack_alike(parts) for parts in groups]
            matrices = [part for part in packed if isinstance(part, PackedMatrix)]
            if len(packed) == 1:
                return packed[0]
            if len(matrices) == len(packed):
                return JoinedMatrix(matrices)
        if all(isinstance(part, QuantizedTensor) for part in weight.parts):
            return self.pack(concatenate_quantized(cast(Sequence[QuantizedTensor], weight.parts)))
        return self.pack(ConcatenatedWeight([dequantize_weight(part) for part in weight.parts]))

    def _pack_alike(self, parts: Sequence[StoredWeight]) -> Weight:
        """Pack quantized weights of the same format as one."""
        if isinstance(parts[0], BlockTensor):
            return PackedBlockMatrix(cast(Sequence[BlockTensor], parts), self._library, self._memory)
        return self.pack(concatenate_alike(parts))

    def pack_layers(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> DecoderLayers:
        if layers and all(map(CpuDecoderLayers.supports, layers)):
            return CpuDecoderLayers(layers, dtype, self._classes)
        return super().pack_layers(layers, dtype)

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        if not isinstance(layers, CpuDecoderLayers) or not attention.slices:
            return super().forward_layers(layers, x, attention)
        return layers.run(x, attention)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        packed = weight if isinstance(weight, PackedMatrix) else self.pack(weight)
        if not isinstance(packed, PackedMatrix):
            return super().linear(x, weight, bias)
        product: Tensor = self._library.linear(x, packed.tensors, packed.layout, bias)
        return product

    def qkv_proj_rope(
        self, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, heads = layer.qkv, layer.q_heads + 2 * layer.kv_heads
        cos, sin = layer.tables or (None, None)
        if not isinstance(qkv, PackedMatrix) or (cos is not None and not _rotates_all_dims(cos, qkv.shape[0], heads)):
            return super().qkv_proj_rope(layer, x, added, positions)
        outputs: tuple[Tensor, Tensor, Tensor, Tensor] = self._library.qkv_proj_rope(
            x,
            added,
            layer.norm,
            layer.eps,
            qkv.tensors,
            qkv.layout,
            layer.qkv_bias,
            *(layer.qk_norm or (None, None)),
            cos,
            sin,
            positions,
            layer.q_heads,
            layer.kv_heads,
        )
        return outputs

    def o_proj_add_norm(self, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        o = layer.o
        if not isinstance(o, PackedMatrix):
            return super().o_proj_add_norm(layer, x, mixed)
        norms = layer.post_norm, layer.next_norm, layer.eps
        weight = o.tensors, o.layout, layer.o_bias
        found: tuple[Tensor, Tensor] = self._library.o_proj_add_norm(x, mixed, *weight, *norms)
        return found

    def mlp(self, weights: GatedMLP, h: Tensor) -> Tensor:
        up, down = weights.gate_up, weights.down
        if not isinstance(up, PackedMatrix) or not isinstance(down, PackedMatrix):
            return super().mlp(weights, h)
        going_up = up.tensors, up.layout, weights.gate_up_bias
        going_down = down.tensors, down.layout, weights.down_bias
        out: Tensor = self._library.mlp(h, *going_up, *going_down, weights.activation == "gelu_tanh")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._library.rms_norm(x, weight, eps)
        return normed

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = self._library.add_rms_norm(x, delta, weight, eps)
        return outputs

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        rotated: Tensor = self._library.rope(x, cos, sin, positions)
        return rotated

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self._library.silu_mul(gate_up)
        return gated

    def sample(self, logits: Tensor, params: Tensor) -> Tensor:
        tokens: Tensor = self._library.sample(logits, params)
        return tokens

    def check_slots(self, store: KVStore, layer: int, at: Slots, num_tokens: int) -> None:
        if at.split_heads != store.split_heads:
            return super().check_slots(store, layer, at, num_tokens)  # raises ValueError
        self._forget(at)
        heads, _, _ = store.heads(layer)
        self._library.check_slots(store.k(layer), heads, *_address_arguments(at), num_tokens)
        return None

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        planes = store.k(layer), store.v(layer)
        self._library.write_kv(*planes, *list_rotations(store), store.k_center(layer), k, v, *_address_arguments(at))

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        at: Slots,
        spec: LayerSpec,
        *,
        window: int | None = None,
        lse: Tensor | None = None,
    ) -> None:
        if max(spec.head_dim, spec.v_head_dim) > MAX_DIM:
            return super().attend(out, q, store, layer, at, spec, window=window, lse=lse)
        heads = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        if heads != store.heads(layer) or q.shape[1:2] != (spec.num_q_heads,) or store.split_heads != at.split_heads:
            check_attend(out, q, store, layer, at, spec, window, lse)  # raises ValueError
        self._library.attend(
            out,
            q,
            store.k(layer),
            store.v(layer),
            *list_rotations(store),
            spec.num_kv_heads,
            *_address_arguments(at),
            NO_WINDOW if spec.window is None else spec.window,
            NO_WINDOW if window is None else window,
            spec.scale,
            spec.softcap or 0.0,
            spec.sink_logits,
            lse,
        )
        return None

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        self._library.copy_tokens(store.k(layer), store.v(layer), src, dst, store.pages_per_block)

    def select_blocks(self, out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> None:
        if q.dim() == 3 and q.shape[2] > MAX_DIM:
            return super().select_blocks(out, q, summaries, candidates, counts)
        self._library.select_blocks(out, q, summaries, candidates, counts)
        return None


def _rotates_all_dims(cos: Tensor, outputs: int, heads: int) -> bool:
    """Return whether a RoPE table rotates all dimensions of all heads."""
    return cos.dim() == 2 and 2 * cos.shape[1] * heads == outputs


def _address_arguments(at: Slots) -> tuple[Tensor | int | None, ...]:
    """Return a step's addresses as the arguments of attention.cpp, in its order."""
    tensors = at.table, at.table_row, at.q_start, at.start, at.window_start
    return *tensors, at.block_size, at.sinks, at.ring, at.num_decode, at.max_q, at.max_kv
