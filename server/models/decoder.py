"""The forward pass of Llama-like models, as their config describes it. Knows no cache and no request.

All arithmetic is done by `Ops`; keys and values are stored and read only by the `Attention` of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.composite import shift_rope
from kernels.ops import Attention, Ops, PackedWeight, Weight
from kernels.types import LayerSpec
from kernels.weights.block_formats import BlockTensor
from kernels.weights.quantization import QuantizedTensor
from kernels.weights.stored import ConcatenatedWeight, dequantize_weight, get_format
from server.models.base import ForwardStepMixin
from server.models.config import ModelConfig
from server.models.layers import load_embedding_and_head, load_layer, load_norm
from server.models.rope import compute_rope_tables
from server.models.weights import Weights
from server.records import WeightUsage


class Decoder(ForwardStepMixin):
    """Implements `server.models.base.Model` for the families in families.py."""

    impl: Literal["lean"] = "lean"

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype, *, positions: int | None = None
    ) -> None:
        """Load the model. `dtype` is that of activations, keys and values; weights keep the dtype they were read in.

        `positions`: the length of the longest text, by default the model's max_position_embeddings. Raises ModelError
        if weights are missing or do not fit the config.
        """
        self.config = config
        self.info = config.info
        self.dtype = dtype
        self._ops = ops
        self._embedding, self._lm_head = load_embedding_and_head(config, weights, ops)
        # Gemma's factor of embeddings is rounded to the activations' dtype, as it was in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        tables = cache(partial(compute_rope_tables, positions=positions or config.max_positions, device=self.device))
        self.layer_specs = [
            make_layer_spec(config, layer.window)._replace(rotate=partial(self._shift_positions, i))
            for i, layer in enumerate(config.layers)
        ]
        layers = [load_layer(config, weights, ops, i, self.layer_specs[i], tables) for i in range(config.num_layers)]
        self._norm = load_norm(config, weights, "model.norm", config.hidden_dim)
        self._layers = ops.pack_layers(layers, dtype)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes; tied weights count once."""
        return sum(weight.nbytes for weight in self._weights())

    @property
    def weight_formats(self) -> Mapping[str, WeightUsage]:
        """How many weights there are in each format, such as "float32" or "Q4_K", that with most of them first."""
        counts, sizes = Counter[str](), Counter[str]()
        for weight in self._weights():
            for part in weight.parts if isinstance(weight, PackedWeight | ConcatenatedWeight) else (weight,):
                name = part.format if isinstance(part, PackedWeight) else get_format(part)
                counts[name] += part.shape.numel()
                sizes[name] += part.nbytes
        return {name: WeightUsage(count, sizes[name]) for name, count in counts.most_common()}

    def _weights(self) -> Iterable[Weight]:
        """Return all weights; tied weights occur once."""
        layers = (weight for layer in self._layers.layers for weight in layer.tensors())
        return {id(w): w for w in (self._embedding, self._norm, self._lm_head, *layers)}.values()

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [N, d] of ids [N] int64; a packed or quantized embedding is unpacked row by row."""
        match self._embedding:
            case Tensor():
                x = F.embedding(ids, self._embedding)
            case PackedWeight():
                x = self._embedding.rows(ids)
            case QuantizedTensor() | BlockTensor():
                x = dequantize_weight(self._embedding.rows(ids))
            case ConcatenatedWeight():
                raise AssertionError("an embedding is one weight")
        x = x.to(self.dtype)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] of ids [N] int64, for rows `attention.logit_index`; float32 if they are soft-capped."""
        return self.forward_embedded(self.embed(ids), attention)

    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] from embeddings x [N, d], as `forward` does from ids."""
        x = self._ops.forward_layers(self._layers, x, attention)
        hidden = self._ops.rms_norm(x.index_select(0, attention.logit_index), self._norm, self.config.rms_norm_eps)
        return apply_softcap(self._ops.linear(hidden, self._lm_head), self.config.logit_softcap)

    def count_flops(self, num_tokens: int, num_logits: int) -> int:
        """Return the number of floating-point operations of a step's matrix products with weights, without routers."""
        c = self.config
        d, q, kv = c.hidden_size, c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = (q + 2 * kv) * d + q * d
        widths = [
            c.intermediate_size if e is None else e.num_experts_per_tok * e.intermediate_size
            for e in (layer.experts for layer in c.layers)
        ]
        return 2 * num_tokens * sum(attention + 3 * width * d for width in widths) + 2 * num_logits * c.vocab_size * d

    def _shift_positions(self, i: int, x: Tensor, delta: Tensor) -> Tensor:
        """Return keys or queries x [N,H,D] of layer `i` with RoPE positions shifted by `delta` [N], also negative."""
        return shift_rope(self._ops, x, self._layers.layers[i].attention.tables, delta)


def make_layer_spec(config: ModelConfig, window: int | None) -> LayerSpec:
    """Return the attention of a layer with this window, without what rotates its keys."""
    return LayerSpec(
        config.num_kv_heads,
        config.num_q_heads,
        config.head_dim,
        config.head_dim,
        window=window,
        scale=config.scale,
        softcap=config.softcap,
    )


def apply_softcap(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) (Gemma 2); if `cap` is None, the logits unchanged."""
    return logits if cap is None else cap * torch.tanh(logits.float() / cap)
