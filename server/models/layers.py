"""Loads one layer's weights by their names in checkpoints, and computes mixtures of experts (`SparseMoE`).

Checks names and shapes. Does not compute attention or positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.ops import AttentionWeights, DecoderLayer, GatedMLP, Ops, RopeTables, Weight
from kernels.types import LayerSpec
from kernels.weights.stored import ConcatenatedWeight, dequantize_weight
from server.models.config import Dim, MixtureOfExperts, ModelConfig, Rope
from server.models.weights import Matrix, Shape, Weights

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names of tensors


@dataclass(frozen=True)
class SparseMoE:
    """A mixture of experts: a router [E, d] chooses and weighs top_k of E MLPs for each token (Shazeer et al. 2017)."""

    router: Weight
    experts: Sequence[GatedMLP]
    top_k: int
    norm_topk_prob: bool

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        probs = ops.linear(h, self.router).float().softmax(-1)  # [N, E]
        weights, experts = probs.topk(self.top_k, dim=-1)  # [N, chosen]
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for e in experts.unique().tolist():
            token, place = (experts == e).nonzero(as_tuple=True)
            expert_out = ops.mlp(self.experts[e], h[token])
            out.index_add_(0, token, (expert_out * weights[token, place, None]).to(h.dtype))
        return out

    def pack(self, ops: Ops) -> SparseMoE:
        return replace(self, router=ops.pack(self.router), experts=[expert.pack(ops) for expert in self.experts])

    def tensors(self) -> Iterator[Weight]:
        yield self.router
        for expert in self.experts:
            yield from expert.tensors()


def load_norm(config: ModelConfig, weights: Weights, name: str, width: Dim) -> Tensor:
    """Return a norm's weights [width] plus norm_offset; with an offset in float32, as bfloat16 would round the sum."""
    weight = weights.get(f"{name}.weight", (width,))
    return weight.float() + config.norm_offset if config.norm_offset else weight


def load_embedding_and_head(config: ModelConfig, weights: Weights, ops: Ops) -> tuple[Weight, Weight]:
    """Return the embedding and lm_head, the same object if they are tied. Raises ModelError if one is missing.

    A head of its own counts, even if the configuration ties it to the embedding: so do transformers and vLLM.
    """
    shape = (config.vocab_dim, config.hidden_dim)
    if config.tie_embeddings and not _has_own_head(weights, shape):
        tied = ops.pack(weights.matrix(EMBEDDING, shape))
        return tied, tied
    return weights.embedding(EMBEDDING, shape), ops.pack(weights.matrix(HEAD, shape))


def _has_own_head(weights: Weights, shape: Shape) -> bool:
    if HEAD not in weights or torch.equal(weights.get(HEAD, shape), weights.get(EMBEDDING, shape)):
        return False
    log.warning("%s differs from the embedding and is used, although config.json ties them", weights.describe(HEAD))
    return True


def load_layer(
    config: ModelConfig, weights: Weights, ops: Ops, i: int, spec: LayerSpec, tables: Callable[[Rope], RopeTables]
) -> DecoderLayer:
    """Return layer `i` with packed matrices; `tables` computes RoPE tables. Raises ModelError if weights do not fit."""
    at = f"model.layers.{i}."
    projections = f"{at}self_attn."
    c, kind = config, config.layers[i]

    def norm(name: str, width: Dim = c.hidden_dim) -> Tensor:
        return load_norm(c, weights, f"{at}{name}", width)

    after_attention = "pre_feedforward_layernorm" if c.sandwich_norm else "post_attention_layernorm"
    parts = {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}
    qkv, qkv_bias = _load_fused(weights, projections, "qkv_proj", parts, c.hidden_dim, c.qkv_bias)
    attention = AttentionWeights(
        norm=norm("input_layernorm"),
        qkv=ops.pack(qkv),
        qkv_bias=qkv_bias,
        qk_norm=(norm("self_attn.q_norm", c.head_width), norm("self_attn.k_norm", c.head_width)) if c.qk_norm else None,
        # RoPE tables are computed after the projections were loaded, which checks the head dimension of config.json.
        tables=None if kind.rope is None else tables(kind.rope),
        q_heads=c.num_q_heads,
        kv_heads=c.num_kv_heads,
        o=weights.matrix(f"{projections}o_proj.weight", (c.hidden_dim, c.q_size)),
        o_bias=weights.get(f"{projections}o_proj.bias", (c.hidden_dim,)) if c.o_bias else None,
        post_norm=norm("post_attention_layernorm") if c.sandwich_norm else None,
        next_norm=norm(after_attention),
        eps=c.rms_norm_eps,
    )
    mlp = _load_mixture(c, weights, ops, at, kind.experts) if kind.experts else _load_mlp(c, weights, ops, f"{at}mlp.")
    return DecoderLayer(spec, attention.pack(ops), mlp, norm("post_feedforward_layernorm") if c.sandwich_norm else None)


def _load_fused(
    weights: Weights, at: str, fused: str, parts: Mapping[str, Dim], width: Dim, biased: bool
) -> tuple[Matrix | ConcatenatedWeight, Tensor | None]:
    """Return a matrix and its bias: `fused` if the checkpoint has it, else its `parts` (name: rows), concatenated."""
    if f"{at}{fused}.weight" in weights:
        parts = {fused: Dim(sum(parts.values()), " + ".join(rows.description for rows in parts.values()))}
    matrix = _concatenate([weights.matrix(f"{at}{name}.weight", (rows, width)) for name, rows in parts.items()])
    if not biased:
        return matrix, None
    return matrix, torch.cat([weights.get(f"{at}{name}.bias", (rows,)) for name, rows in parts.items()])


def _concatenate(parts: Sequence[Matrix]) -> Matrix | ConcatenatedWeight:
    """Concatenate matrices along the first dimension; if only some are quantized, these are dequantized."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, Tensor)]
    return ConcatenatedWeight([dequantize_weight(part).to(plain[0].dtype) for part in parts] if plain else parts)


def _load_mlp(config: ModelConfig, weights: Weights, ops: Ops, at: str) -> GatedMLP:
    d, width = config.hidden_dim, Dim(config.intermediate_size, "intermediate_size")
    parts = {"gate_proj": width, "up_proj": width}
    gate_up, gate_up_bias = _load_fused(weights, at, "gate_up_proj", parts, d, config.mlp_bias)
    down_bias = weights.get(f"{at}down_proj.bias", (d,)) if config.mlp_bias else None
    down = weights.matrix(f"{at}down_proj.weight", (d, width))
    return GatedMLP(ops.pack(gate_up), gate_up_bias, down, down_bias, config.activation).pack(ops)


def _load_mixture(config: ModelConfig, weights: Weights, ops: Ops, at: str, experts: MixtureOfExperts) -> SparseMoE:
    at = f"{at}{experts.module}."
    gate, up, down = experts.projections
    d, width = config.hidden_dim, Dim(experts.intermediate_size, "the width of an expert")

    def load_expert(e: int) -> GatedMLP:
        each = f"{at}experts.{e}."
        gate_up = _concatenate([weights.matrix(f"{each}{part}.weight", (width, d)) for part in (gate, up)])
        back = weights.matrix(f"{each}{down}.weight", (d, width))
        return GatedMLP(ops.pack(gate_up), None, back, None, config.activation).pack(ops)

    router = ops.pack(weights.get(f"{at}gate.weight", (Dim(experts.num_experts, "the number of experts"), d)))
    return SparseMoE(
        router,
        [load_expert(e) for e in range(experts.num_experts)],
        experts.num_experts_per_tok,
        experts.norm_topk_prob,
    )
