"""The forward pass of Llama-like models, driven by their config. Knows positions; no cache, no batch, no request.

All arithmetic goes through `Ops`; all keys and values through the `Attention` it is handed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Attention, LayerSpec, Ops
from kernels.quantised import Quantised, dequantise
from server.models.config import ModelConfig
from server.models.layers import LayerWeights, check_shapes, load_layer, load_norm, multiplied
from server.models.rope import rope_tables
from server.models.weights import Matrix, Weights


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


class Decoder:
    """Implements `server.models.base.Model` for the families in families.py."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype, *, positions: int | None = None
    ) -> None:
        """`dtype` is that of activations, keys and values; the weights keep the one they were read with.

        `positions`: the longest text it will see; default: what the model was made for. Raises ModelError.
        """
        self.config = config
        self.facts = config.facts
        self.dtype = dtype
        self._ops = ops
        self._embedding = weights.embedding("model.embed_tokens.weight")
        # Gemma: the factor is rounded to the activations' type, as it was in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._layers = [load_layer(config, weights, i) for i in range(config.num_layers)]
        self._norm = load_norm(config, weights, "model.norm")
        tied = config.tie_embeddings or "lm_head.weight" not in weights
        self._lm_head = self._embedding if tied else weights.matrix("lm_head.weight")
        check_shapes(config, self._layers, self._embedding, self._lm_head)
        self._tables = _tables(config, positions or config.max_positions, self.device)
        self.specs = [self._spec(i, layer.window) for i, layer in enumerate(config.layers)]

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def weight_bytes(self) -> int:
        """Of all distinct weights."""
        return sum(weight.nbytes for weight in self._weights())

    @property
    def weight_format(self) -> str:
        """What most weights are kept in: "float32", "int4"."""
        counts: Counter[str] = Counter()
        for weight in self._weights():
            kept = f"int{weight.bits}" if isinstance(weight, Quantised) else str(weight.dtype).removeprefix("torch.")
            counts[kept] += weight.shape.numel()
        return counts.most_common(1)[0][0]

    def _weights(self) -> Iterable[Matrix]:
        """Each once."""
        layers = (weight for layer in self._layers for weight in layer.tensors())
        return {id(w): w for w in (self._embedding, self._norm, self._lm_head, *layers)}.values()

    def embed(self, ids: Tensor) -> Tensor:
        """ids [N] int64 -> [N, d]; of a quantised embedding, these rows alone are dequantised."""
        if isinstance(self._embedding, Quantised):
            x = dequantise(self._embedding.rows(ids)).to(self.dtype)
        else:
            x = F.embedding(ids, self._embedding).to(self.dtype)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """ids [N] int64 -> logits [K, V] float32 of the rows `attention.logit_index`."""
        return self.forward_embedded(self.embed(ids), attention)

    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """x [N, d] -> logits [K, V] float32; `forward` for tokens that are embedded already."""
        added: Tensor | None = None
        for i, layer in enumerate(self._layers):
            x, added = self._layer(i, layer, x, added, attention)
        assert added is not None
        x = x + added
        logits = multiplied(self._ops, self._normed(x[attention.logit_index], self._norm), self._lm_head).float()
        return softcapped(logits, self.config.logit_softcap)

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

    def _layer(
        self, i: int, layer: LayerWeights, x: Tensor, added: Tensor | None, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """x [N, d] and what is still to be added to it -> the same after the layer."""
        x, h = self._sum(x, added, layer.attention_norm)
        q, k, v = self._qkv(i, layer, h, attention.positions)
        mixed = multiplied(self._ops, attention.attend(i, q, k, v).flatten(1), layer.o, layer.o_bias)
        x, h = self._sum(x, self._normed(mixed, layer.post_attention_norm), layer.mlp_norm)
        fed = layer.feed_forward(self._ops, self.config.activation, h)
        return x, self._normed(fed, layer.post_mlp_norm)

    def _sum(self, x: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum [N, d], and its norm."""
        if added is None:
            return x, self._normed(x, weight)
        return self._ops.add_rms_norm(x, added, weight, self.config.rms_norm_eps)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x [N, d], or as it is where the model has no norm."""
        return x if weight is None else self._ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def _qkv(self, i: int, layer: LayerWeights, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [N, d] -> q [N,Hq,D], k [N,H,D] at their positions, v [N,H,D]."""
        c = self.config
        qkv = multiplied(self._ops, h, layer.qkv, layer.qkv_bias).view(h.shape[0], -1, c.head_dim)
        qk, v = qkv.split_with_sizes((c.num_q_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk = torch.cat(
                [
                    self._normed(part.reshape(-1, c.head_dim), weight).view(part.shape)
                    for part, weight in zip(
                        qk.split((c.num_q_heads, c.num_kv_heads), dim=1), layer.qk_norm, strict=True
                    )
                ],
                dim=1,
            )
        q, k = self._turned(i, qk, positions).split_with_sizes((c.num_q_heads, c.num_kv_heads), dim=1)
        return q, k, v

    def _turned(self, i: int, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """x [N,H,D] turned by the layer's RoPE, or back; dimensions beyond those of the tables stay."""
        table = self._tables[i]
        if table is None:
            return x
        cos, sin = table
        sin = -sin if back else sin
        turning = 2 * cos.shape[1]
        if turning == x.shape[-1]:
            return self._ops.rope(x, cos, sin, positions)
        turned = self._ops.rope(x[..., :turning], cos, sin, positions)
        return torch.cat((turned, x[..., turning:]), dim=-1)

    def _spec(self, i: int, window: int | None) -> LayerSpec:
        c = self.config
        return LayerSpec(
            c.num_kv_heads,
            c.num_q_heads,
            c.head_dim,
            c.head_dim,
            window=window,
            scale=c.scale,
            softcap=c.softcap,
            rotate=partial(self._moved, i),
        )

    def _moved(self, i: int, x: Tensor, delta: Tensor) -> Tensor:
        """x [N,H,D] as if computed `delta` [N] positions later, or, where that is negative, earlier."""
        forth, back = (self._turned(i, x, delta.abs(), back=back) for back in (False, True))
        return torch.where((delta < 0).view(-1, 1, 1), back, forth)


def _tables(config: ModelConfig, positions: int, device: torch.device) -> list[tuple[Tensor, Tensor] | None]:
    """Of every layer; layers that turn alike share theirs."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    made = {rope: rope_tables(rope, positions, device) for rope in ropes}
    return [None if layer.rope is None else made[layer.rope] for layer in config.layers]


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) (Gemma 2)."""
    return logits if cap is None else cap * torch.tanh(logits / cap)
