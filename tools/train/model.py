"""A small Llama in PyTorch for training: whole rows in, logits out, without cache, padding or generation.

Its parameters have the names of a Hugging Face Llama without the prefix `model.`, so that exporting only copies them.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 640
    theta: float = 500_000.0
    norm_eps: float = 1e-5
    positions: int = 2048

    @property
    def frequencies(self) -> Tensor:
        """The frequencies of the RoPE pairs in radians per token, (head_dim / 2,), fastest first."""
        return 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in Llama's layout to x (B, heads, T, head_dim): dimension i is paired with i + head_dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        # RoPE returns float32; v has the dtype of autocast.
        q, k = (apply_rotary_emb(x, cos, sin).to(v.dtype) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, width)
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)  # (B, heads, T, head_dim)


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)
        angles = torch.outer(torch.arange(shape.positions).float(), shape.frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)  # (positions, head_dim)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, layer) for layer in self.layers]

    def forward(self, ids: Tensor) -> Tensor:
        """Compute logits (B, T, vocabulary) of ids (B, T); input and output embeddings are tied."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the cross-entropy; logits are (B, T, V), targets and weights (B, T)."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()
