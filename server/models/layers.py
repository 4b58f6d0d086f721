"""The weights of one layer as the decoder wants them, from the names that checkpoints give them.

Knows names and shapes, and who of several feed-forwards is asked; neither attention nor positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.composed import multiplied
from kernels.layer import AttentionWeights, DecoderLayer, Factor, FeedForward, GatedWeights, Tables
from kernels.memory import Joined
from kernels.ops import LayerSpec, Ops
from kernels.quantised import Quantised, dequantise, joined
from server.models.config import MixtureOfExperts, ModelConfig
from server.models.errors import ModelError
from server.models.weights import Matrix, Weights


@dataclass(frozen=True)
class Mixture:
    """A router [E, d] chooses a few of E dense feed-forwards for each token, and weighs them (Shazeer et al. 2017)."""

    router: Factor
    experts: Sequence[GatedWeights]
    chosen: int
    normalise: bool

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        shares = multiplied(ops, h, self.router).float().softmax(-1)  # [N, E]
        weights, experts = shares.topk(self.chosen, dim=-1)  # [N, chosen]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for e in experts.unique().tolist():
            token, place = (experts == e).nonzero(as_tuple=True)
            fed = ops.feed_forward(self.experts[e], h[token])
            out.index_add_(0, token, (fed * weights[token, place, None]).to(h.dtype))
        return out

    def packed(self, ops: Ops) -> Mixture:
        return replace(self, router=ops.packed(self.router), experts=[expert.packed(ops) for expert in self.experts])

    def tensors(self) -> Iterator[Factor]:
        yield self.router
        for expert in self.experts:
            yield from expert.tensors()


def load_norm(config: ModelConfig, weights: Weights, name: str) -> Tensor:
    """The factors of a norm, [d]; sums are kept in float32, as bfloat16 would round them away."""
    weight = weights.get(f"{name}.weight")
    return weight.float() + config.norm_offset if config.norm_offset else weight


def load_ends(config: ModelConfig, weights: Weights, ops: Ops) -> tuple[Factor, Factor]:
    """The embedding and lm_head; where they are tied, one weight. Raises ModelError for what the checkpoint lacks."""
    embedding = "model.embed_tokens.weight"
    if config.tie_embeddings or "lm_head.weight" not in weights:
        tied = ops.packed(weights.matrix(embedding))
        return tied, tied
    return weights.embedding(embedding), ops.packed(weights.matrix("lm_head.weight"))


def load_layer(
    config: ModelConfig, weights: Weights, ops: Ops, i: int, spec: LayerSpec, tables: Tables | None
) -> DecoderLayer:
    """Layer `i`, its matrices packed, turning by `tables`. Raises ModelError for what the checkpoint lacks."""
    at = f"model.layers.{i}."
    projections = f"{at}self_attn."

    def norm(name: str) -> Tensor:
        return load_norm(config, weights, f"{at}{name}")

    after_attention = "pre_feedforward_layernorm" if config.sandwich else "post_attention_layernorm"
    qkv, qkv_bias = _fused(weights, projections, "qkv_proj", ("q_proj", "k_proj", "v_proj"), config.qkv_bias)
    attention = AttentionWeights(
        norm=norm("input_layernorm"),
        qkv=ops.packed(qkv),
        qkv_bias=qkv_bias,
        qk_norm=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None,
        tables=tables,
        q_heads=config.num_q_heads,
        kv_heads=config.num_kv_heads,
        o=weights.matrix(f"{projections}o_proj.weight"),
        o_bias=weights.get(f"{projections}o_proj.bias") if config.o_bias else None,
        post_norm=norm("post_attention_layernorm") if config.sandwich else None,
        next_norm=norm(after_attention),
        eps=config.rms_norm_eps,
    )
    experts = config.layers[i].experts
    return DecoderLayer(
        spec,
        attention.packed(ops),
        _dense(config, weights, ops, f"{at}mlp.") if experts is None else _mixture(config, weights, ops, at, experts),
        norm("post_feedforward_layernorm") if config.sandwich else None,
    )


def _fused(
    weights: Weights, at: str, fused: str, parts: Sequence[str], biased: bool
) -> tuple[Matrix | Joined, Tensor | None]:
    """A matrix and its bias, from parts or, in some checkpoints, one already."""
    names = [f"{at}{fused}"] if f"{at}{fused}.weight" in weights else [f"{at}{part}" for part in parts]
    matrix = _joined([weights.matrix(f"{name}.weight") for name in names])
    return matrix, torch.cat([weights.get(f"{name}.bias") for name in names]) if biased else None


def _joined(parts: Sequence[Matrix]) -> Matrix | Joined:
    """Several matrices as one, along the first dimension; quantised if all of them are."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if len(quantised) == len(parts):
        return joined(quantised)
    plain = [part for part in parts if isinstance(part, Tensor)]
    wide = [dequantise(part).to(plain[0].dtype) if isinstance(part, Quantised) else part for part in parts]
    return Joined(wide)


def _dense(config: ModelConfig, weights: Weights, ops: Ops, at: str) -> GatedWeights:
    gate_up, gate_up_bias = _fused(weights, at, "gate_up_proj", ("gate_proj", "up_proj"), config.mlp_bias)
    down_bias = weights.get(f"{at}down_proj.bias") if config.mlp_bias else None
    down = weights.matrix(f"{at}down_proj.weight")
    return GatedWeights(ops.packed(gate_up), gate_up_bias, down, down_bias, config.activation).packed(ops)


def _mixture(config: ModelConfig, weights: Weights, ops: Ops, at: str, experts: MixtureOfExperts) -> Mixture:
    at = f"{at}{experts.module}."
    gate, up, down = experts.split

    def expert(e: int) -> GatedWeights:
        each = f"{at}experts.{e}."
        gate_up = ops.packed(_joined([weights.matrix(f"{each}{part}.weight") for part in (gate, up)]))
        return GatedWeights(gate_up, None, weights.matrix(f"{each}{down}.weight"), None, config.activation).packed(ops)

    router = ops.packed(weights.get(f"{at}gate.weight"))
    return Mixture(router, [expert(e) for e in range(experts.count)], experts.chosen, experts.normalise)


def check_shapes(config: ModelConfig, layers: Sequence[DecoderLayer], embedding: Factor, lm_head: Factor) -> None:
    """Raises ModelError if config.json speaks of another model than the tensors do."""
    c = config
    if c.num_q_heads % c.num_kv_heads or c.head_dim % 2:
        raise ModelError(
            f"config.json: {c.num_q_heads} heads over {c.num_kv_heads} KV heads of {c.head_dim} do not fit: "
            "the first must be a multiple of the second, and the last even"
        )
    for name, tensor, shape in _expected_shapes(c, layers, embedding, lm_head):
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} is {list(tensor.shape)}, and by config.json it should be {list(shape)}")


def _expected_shapes(
    c: ModelConfig, layers: Sequence[DecoderLayer], embedding: Factor, lm_head: Factor
) -> Iterator[tuple[str, Factor, tuple[int, ...]]]:
    heads, kv, d = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    yield "embeddings", embedding, (c.vocab_size, d)
    yield "lm_head", lm_head, (c.vocab_size, d)
    for i, (layer, kind) in enumerate(zip(layers, c.layers, strict=True)):
        yield f"layer {i}: attention_norm", layer.attention.norm, (d,)
        yield f"layer {i}: mlp_norm", layer.attention.next_norm, (d,)
        yield f"layer {i}: qkv", layer.attention.qkv, (heads + 2 * kv, d)
        yield f"layer {i}: o", layer.attention.o, (d, heads)
        width = c.intermediate_size if kind.experts is None else kind.experts.width
        for name, dense in _feed_forwards(layer.feed_forward):
            yield f"layer {i}: {name}gate_up", dense.gate_up, (2 * width, d)
            yield f"layer {i}: {name}down", dense.down, (d, width)


def _feed_forwards(feed_forward: FeedForward) -> Iterator[tuple[str, GatedWeights]]:
    if isinstance(feed_forward, GatedWeights):
        yield "", feed_forward
    elif isinstance(feed_forward, Mixture):
        yield from ((f"expert {e} ", dense) for e, dense in enumerate(feed_forward.experts))
