"""Composes the larger operations of a layer of smaller ones, for backends that do not fuse them.

Knows the order of operations in a layer, but neither how one is computed nor what a cache is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.arguments import ANY, AT_LEAST_ONE, check, check_tensor
from kernels.ops import Attention, AttentionWeights, DecoderLayer, DecoderLayers, GatedMLP, Ops, RopeTables


class CompositeOps(Ops):
    """Implements those operations of `Ops` that can be composed of others, by calling these one after the other."""

    def pack_layers(self: Ops, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> DecoderLayers:
        return DecoderLayers(layers)

    def qkv_proj_rope(
        self: Ops, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _check_qkv_proj_rope(layer, x, positions)
        if added is None:
            h = self.rms_norm(x, layer.norm, layer.eps)
        else:
            x, h = self.add_rms_norm(x, added, layer.norm, layer.eps)
        heads = layer.q_heads, layer.kv_heads
        qkv = self.linear(h, layer.qkv, layer.qkv_bias).unflatten(1, (sum(heads) + layer.kv_heads, -1))
        qk, v = qkv.split_with_sizes((sum(heads), layer.kv_heads), dim=1)
        if layer.qk_norm is not None:
            parts = zip(qk.split_with_sizes(heads, dim=1), layer.qk_norm, strict=True)
            qk = torch.cat([self.rms_norm(t.flatten(0, 1), w, layer.eps).view(t.shape) for t, w in parts], dim=1)
        q, k = apply_rope(self, qk, layer.tables, positions).split_with_sizes(heads, dim=1)
        return x, q, k, v

    def o_proj_add_norm(self: Ops, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.linear(mixed, layer.o, layer.o_bias)
        return self.add_rms_norm(x, _norm(self, projected, layer.post_norm, layer.eps), layer.next_norm, layer.eps)

    def mlp(self: Ops, weights: GatedMLP, h: Tensor) -> Tensor:
        gate_up = self.linear(h, weights.gate_up, weights.gate_up_bias)
        if weights.activation == "silu":
            gated = self.silu_mul(gate_up)
        else:
            check_tensor("mlp", "gate_up", gate_up, (ANY, AT_LEAST_ONE))
            check(gate_up.shape[1] % 2 == 0, "mlp: gate_up must be two halves of one width, and is {}", gate_up.shape)
            gate, up = gate_up.chunk(2, dim=-1)
            gated = F.gelu(gate, approximate="tanh") * up
        return self.linear(gated, weights.down, weights.down_bias)

    def forward_layers(self: Ops, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        added: Tensor | None = None
        for i, layer in enumerate(layers.layers):
            if i == len(layers.layers) // 4:  # a quarter is launched: compute it while the rest is launched
                self.commit()
            x, q, k, v = self.qkv_proj_rope(layer.attention, x, added, attention.positions)
            mixed = attention.attend(i, q, k, v).flatten(1)
            x, h = self.o_proj_add_norm(layer.attention, x, mixed)
            added = _norm(self, layer.mlp(self, h), layer.post_norm, layer.attention.eps)
        return x if added is None else x + added


def apply_rope(ops: Ops, x: Tensor, tables: RopeTables | None, positions: Tensor) -> Tensor:
    """Rotate x [N,H,D] by RoPE; if the tables are narrower than D, the remaining dimensions stay as they are."""
    if tables is None:
        return x
    rotated = 2 * tables[0].shape[1]
    if rotated == x.shape[-1]:
        return ops.rope(x, *tables, positions)
    return torch.cat((ops.rope(x[..., :rotated], *tables, positions), x[..., rotated:]), dim=-1)


def shift_rope(ops: Ops, x: Tensor, tables: RopeTables | None, delta: Tensor) -> Tensor:
    """Rotate x [N,H,D], which RoPE has rotated before, by `delta` [N] further positions, also negative ones."""
    if tables is None:
        return x
    cos, sin = (table.index_select(0, delta.abs()) for table in tables)  # [N, D/2]
    # YaRN and LongRoPE multiply cos and sin by a factor, which x has already; it is in the tables as cos(0)
    factor = tables[0][0, 0]
    own = cos / factor, sin * (delta.sign()[:, None] / factor)
    return apply_rope(ops, x, own, torch.arange(len(delta), device=delta.device))


def _norm(ops: Ops, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Apply RMS norm to x [N, d]; return x itself if `weight` is None, as the model has no such norm."""
    return x if weight is None else ops.rms_norm(x, weight, eps)


def _check_qkv_proj_rope(layer: AttentionWeights, x: Tensor, positions: Tensor) -> None:
    """Check those arguments of `Ops.qkv_proj_rope` that the operations it calls do not check."""
    check(len(layer.qkv.shape) == 2, "qkv_proj_rope: qkv must be [out, in], and is {}", layer.qkv.shape)
    if layer.tables is not None:
        check_tensor("qkv_proj_rope", "cos", layer.tables[0], (ANY, AT_LEAST_ONE), (torch.float32,), x.device)
    heads, outputs = layer.q_heads + 2 * layer.kv_heads, layer.qkv.shape[0]
    check(
        layer.q_heads > 0 and layer.kv_heads > 0 and outputs > 0 and outputs % heads == 0,
        "qkv_proj_rope: qkv has {} outputs, which are not {} query heads and twice {} heads of one dimension",
        *(outputs, layer.q_heads, layer.kv_heads),
    )
    check_tensor("qkv_proj_rope", "positions", positions, x.shape[:1], (torch.int64,), x.device)
