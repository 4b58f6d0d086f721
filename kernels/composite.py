"""What layers do, made of single operations: for every backend that has no better way.

Knows the order of operations in a layer; neither how any of them is computed nor what a cache is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import arguments
from kernels.ops import Attention, AttentionWeights, DecoderLayers, GatedWeights, Ops, Packed, Tables, Weight
from kernels.quantization import Quantized


def multiplied(ops: Ops, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [N, in] by weight [out, in], plus bias [out] -> [N, out], with the operation for such a weight."""
    if isinstance(weight, Quantized) or (isinstance(weight, Packed) and weight.quantized):
        return ops.quantized_linear(x, weight, bias)
    return ops.linear(x, weight, bias)


def normed(ops: Ops, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise x [N, d]; return it as it is where the model has no norm."""
    return x if weight is None else ops.rms_norm(x, weight, eps)


def turned(ops: Ops, x: Tensor, tables: Tables | None, positions: Tensor) -> Tensor:
    """Rotate x [N,H,D] by RoPE; dimensions beyond those of the tables stay."""
    if tables is None:
        return x
    turning = 2 * tables[0].shape[1]
    if turning == x.shape[-1]:
        return ops.rope(x, *tables, positions)
    return torch.cat((ops.rope(x[..., :turning], *tables, positions), x[..., turning:]), dim=-1)


def enter_attention(
    ops: Ops, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `Ops.enter_attention` of other operations."""
    arguments.enter_attention(layer, x, positions)
    if added is None:
        h = ops.rms_norm(x, layer.norm, layer.eps)
    else:
        x, h = ops.add_rms_norm(x, added, layer.norm, layer.eps)
    heads = layer.q_heads, layer.kv_heads
    qkv = multiplied(ops, h, layer.qkv, layer.qkv_bias).unflatten(1, (sum(heads) + layer.kv_heads, -1))
    qk, v = qkv.split_with_sizes((sum(heads), layer.kv_heads), dim=1)
    if layer.qk_norm is not None:
        parts = zip(qk.split_with_sizes(heads, dim=1), layer.qk_norm, strict=True)
        qk = torch.cat([ops.rms_norm(t.flatten(0, 1), w, layer.eps).view(t.shape) for t, w in parts], dim=1)
    q, k = turned(ops, qk, layer.tables, positions).split_with_sizes(heads, dim=1)
    return x, q, k, v


def leave_attention(ops: Ops, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `Ops.leave_attention` of other operations."""
    projected = multiplied(ops, mixed, layer.o, layer.o_bias)
    return ops.add_rms_norm(x, normed(ops, projected, layer.post_norm, layer.eps), layer.next_norm, layer.eps)


def feed_forward(ops: Ops, weights: GatedWeights, h: Tensor) -> Tensor:
    """Compute `Ops.feed_forward` of other operations."""
    gate_up = multiplied(ops, h, weights.gate_up, weights.gate_up_bias)
    if weights.activation == "silu":
        gated = ops.silu_mul(gate_up)
    else:
        arguments.silu_mul(gate_up, "feed_forward")
        gate, up = gate_up.chunk(2, dim=-1)
        gated = F.gelu(gate, approximate="tanh") * up
    return multiplied(ops, gated, weights.down, weights.down_bias)


def run_layers(ops: Ops, stack: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
    """Compute `Ops.run_layers` of other operations."""
    added: Tensor | None = None
    for i, layer in enumerate(stack.layers):
        around = layer.attention
        x, q, k, v = ops.enter_attention(around, x, added, attention.positions)
        x, h = ops.leave_attention(around, x, attention.attend(i, q, k, v).flatten(1))
        added = normed(ops, layer.feed_forward(ops, h), layer.post_norm, around.eps)
    return x if added is None else x + added
