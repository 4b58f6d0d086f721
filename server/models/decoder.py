"""The forward pass of Llama-like models, driven by their config. Knows positions; no cache, no batch, no request.

All arithmetic goes through `Ops`; all keys and values through the `Attention` it is handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Attention, LayerSpec, Ops
from server.models.config import ModelConfig, ModelError
from server.models.weights import Weights


class SequenceCache(Protocol):
    """The keys and values of one sequence: what `forward_step` needs of a cache."""

    @property
    def length(self) -> int:
        """Tokens entered so far."""
        ...

    def begin(self, num_tokens: int) -> Attention:
        """Attention for the next tokens; they have entered once commit() was called."""
        ...

    def commit(self) -> None: ...


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, [out, in]; q, k and v are one matrix, and so are gate and up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """A model ready to run. N tokens of any sequences go in, logits of the K wanted ones come out."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype, *, positions: int | None = None
    ) -> None:
        """`dtype` is that of activations, keys and values; the weights keep the one they were read with.

        `positions`: the longest text it will see; default: what the model was made for.
        """
        self.config = config
        self.dtype = dtype
        self._ops = ops
        self._embedding = weights.get("model.embed_tokens.weight")
        self._layers = [_load_layer(config, weights, i) for i in range(config.num_layers)]
        self._norm = weights.get("model.norm.weight")
        tied = config.tie_embeddings or "lm_head.weight" not in weights
        self._lm_head = self._embedding if tied else weights.get("lm_head.weight")
        self._check_shapes()
        self._cos, self._sin = rope_tables(config, positions or config.max_positions, self._embedding.device)
        self.specs = [self._spec(window) for window in config.windows]

    def _check_shapes(self) -> None:
        """Raises ModelError if config.json speaks of another model than the tensors do."""
        c = self.config
        heads, kv, d, f = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
        expected = {"attention_norm": (d,), "mlp_norm": (d,), "qkv": (heads + 2 * kv, d), "o": (d, heads)}
        expected |= {"gate_up": (2 * f, d), "down": (d, f)}
        found = {
            f"layer {i}: {name}": getattr(each, name).shape for i, each in enumerate(self._layers) for name in expected
        }
        wanted = {key: expected[key.rpartition(" ")[2]] for key in found}
        found |= {"embeddings": self._embedding.shape, "lm_head": self._lm_head.shape}
        wanted |= {"embeddings": (c.vocab_size, d), "lm_head": (c.vocab_size, d)}
        for key, shape in found.items():
            if tuple(shape) != wanted[key]:
                raise ModelError(f"{key} is {list(shape)}, and by config.json it should be {list(wanted[key])}")
        if c.num_q_heads % c.num_kv_heads or c.head_dim % 2:
            raise ModelError(
                f"config.json: {c.num_q_heads} heads over {c.num_kv_heads} KV heads of {c.head_dim} do not fit"
            )

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def weight_bytes(self) -> int:
        """Of all distinct weights."""
        tensors = [self._embedding, self._norm, self._lm_head]
        tensors += [t for layer in self._layers for t in vars(layer).values() if t is not None]
        return sum(t.nbytes for t in {t.data_ptr(): t for t in tensors}.values())

    def embed(self, ids: Tensor) -> Tensor:
        """ids [N] int64 -> [N, d]."""
        return F.embedding(ids, self._embedding).to(self.dtype)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """ids [N] int64 -> logits [K, V] float32 of the rows `attention.logit_index`."""
        return self.forward_embedded(self.embed(ids), attention)

    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """x [N, d] -> logits [K, V] float32; `forward` for tokens that are embedded already."""
        for i, layer in enumerate(self._layers):
            x = self._layer(i, layer, x, attention)
        x = self._ops.rms_norm(x[attention.logit_index], self._norm, self.config.rms_norm_eps)
        return self._ops.linear(x, self._lm_head).float()

    def forward_step(self, token_embedding: Tensor, current_pos: int, cache: SequenceCache) -> Tensor:
        """One token of one sequence: its embedding [1, 1, d_model] -> the logits [1, 1, V] of the token after it.

        Mechanism: the token's query attends over the keys of all tokens before it, which `cache` kept from their own
        steps, and over its own; only its own key and value are computed, at RoPE position `current_pos`, and they enter
        the cache. So a step costs one pass over the weights and one over the cached keys, whatever came before; nothing
        is recomputed, and nothing is allocated that grows with the text.

        This is the batched forward with a batch of one. Raises ValueError if the cache does not stand at `current_pos`:
        it would hold other keys than the caller thinks.
        """
        if current_pos != cache.length:
            raise ValueError(f"current_pos is {current_pos}, but the cache holds {cache.length} tokens")
        logits = self.forward_embedded(token_embedding.reshape(1, -1), cache.begin(1))
        cache.commit()
        return logits.view(1, 1, -1)

    def _layer(self, i: int, layer: _Layer, x: Tensor, attention: Attention) -> Tensor:
        """x [N, d] -> [N, d]."""
        ops, c = self._ops, self.config
        h = ops.rms_norm(x, layer.attention_norm, c.rms_norm_eps)
        qkv = ops.linear(h, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, c.head_dim)
        qk, v = qkv.split((c.num_q_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        qk = ops.rope(qk, self._cos, self._sin, attention.positions)
        q, k = qk.split((c.num_q_heads, c.num_kv_heads), dim=1)
        mixed = attention.attend(i, q, k, v).flatten(1)
        x = x + ops.linear(mixed, layer.o, layer.o_bias)
        h = ops.rms_norm(x, layer.mlp_norm, c.rms_norm_eps)
        gated = ops.silu_mul(ops.linear(h, layer.gate_up, layer.gate_up_bias))
        return x + ops.linear(gated, layer.down, layer.down_bias)

    def _spec(self, window: int | None) -> LayerSpec:
        c = self.config
        return LayerSpec(
            c.num_kv_heads,
            c.num_q_heads,
            c.head_dim,
            c.head_dim,
            window=window,
            scale=c.head_dim**-0.5,
            rotate=self._rotate,
        )

    def _rotate(self, x: Tensor, delta: Tensor) -> Tensor:
        """x [N,H,D] as if computed `delta` [N] positions later, or, where that is negative, earlier."""
        back = (delta < 0).view(-1, 1, 1)
        forth = self._ops.rope(x, self._cos, self._sin, delta.abs())
        return torch.where(back, self._ops.rope(x, self._cos, -self._sin, delta.abs()), forth)


def rope_tables(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2] float32; angles in float64 (float32 is off by 2e-3 rad at position 1e5)."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def _load_layer(config: ModelConfig, weights: Weights, i: int) -> _Layer:
    at = f"model.layers.{i}."
    qkv = [f"{at}self_attn.{x}_proj" for x in "qkv"]
    gate_up = [f"{at}mlp.{x}_proj" for x in ("gate", "up")]

    def biases(present: bool, *modules: str) -> Tensor | None:
        return weights.joined(*(f"{module}.bias" for module in modules)) if present else None

    return _Layer(
        attention_norm=weights.get(f"{at}input_layernorm.weight"),
        qkv=weights.joined(*(f"{module}.weight" for module in qkv)),
        qkv_bias=biases(config.qkv_bias, *qkv),
        o=weights.get(f"{at}self_attn.o_proj.weight"),
        o_bias=biases(config.o_bias, f"{at}self_attn.o_proj"),
        mlp_norm=weights.get(f"{at}post_attention_layernorm.weight"),
        gate_up=weights.joined(*(f"{module}.weight" for module in gate_up)),
        gate_up_bias=biases(config.mlp_bias, *gate_up),
        down=weights.get(f"{at}mlp.down_proj.weight"),
        down_bias=biases(config.mlp_bias, f"{at}mlp.down_proj"),
    )
