"""A lean, differentiable Llama for training, and the planted initialisation that gives it recall early.

Its parameters carry the names that a Hugging Face Llama gives them, less the `model.` in front, so that exporting is
copying. There is no cache, no padding and no generation here: whole rows in, logits out.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
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
        """(head_dim / 2,) radians per token of each RoPE pair, fastest first."""
        return 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Llama's layout: dimension i is paired with i + head_dim / 2.  x: (B, heads, T, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(x, cos, sin).to(v.dtype) for x in (q, k))  # v keeps the precision of autocast, RoPE does not
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, width)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)  # (B, heads, T, head_dim)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
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
        """ids: (B, T) -> logits: (B, T, vocabulary); input and output embeddings are tied."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy in which each target counts by its weight.  logits: (B, T, V), the others (B, T)."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


# ---- planted initialisation
#
# Recall needs an induction circuit: heads that note what stood just before each token, and a later head that finds the
# place where the same things stood before what is sought, and copies what follows (Olsson et al., arXiv 2209.11895).
# Such circuits form late by themselves: after millions of tokens. So they are planted, roughly, and training refines
# them; the result is an ordinary Llama. What is planted:
#   embedding  one constant column, so that a head can look at a place whatever the token there;
#   layer 0    head h copies the token h + 1 back, found by the phases of RoPE, into a band of its own;
#   layer 1    two heads attend to where the last four tokens were the ones before, using only the slow RoPE pairs,
#              which hold over distance; they copy the token there. They differ in the random vectors they compare
#              and in what they copy, so that together they err less;
#   elsewhere  output projections are zero, so every other head and every feed-forward starts silent.

_SCALE = 0.3  # standard deviation of the embedding: large, so that no few steps undo what is planted
_FIRST_LOGITS = 0.8  # standard deviation of the logits, set by the last norm's weight
_CONSTANT = 4 * _SCALE  # of the constant column
_LOUD = 3.5  # how loud layer 0 writes, against the embedding
_LOCATE = 3.0  # how sharply layer 0 looks a few tokens back
_COUNTS = (5.0, 1.2, 1.6, 1.6)  # how much the present token, the one before, ... count when layer 1 compares
_KEY = 1.0
_COPY = 25.0
_LOCATING_PAIRS = 6  # the fastest RoPE pairs: one token more or less is a large turn
_SLOWEST_TURN = 1.5  # radians a "slow" pair may turn over all positions


@torch.no_grad()
def plant(model: Llama) -> None:
    """Initialise for early recall, as described above. Draws from torch's global generator."""
    shape = model.shape
    nn.init.normal_(model.embed_tokens.weight, std=_SCALE)
    model.embed_tokens.weight[:, 0] = _CONSTANT
    nn.init.constant_(model.norm.weight, _FIRST_LOGITS / (_SCALE * math.sqrt(shape.width)))
    for block in model.blocks:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    bands = _bands(shape)
    _plant_looking_back(model.blocks[0].self_attn, shape, bands)
    _plant_matching(model.blocks[1].self_attn, shape, bands)


class _Bands(NamedTuple):
    """Orthogonal parts of the residual stream, blind to the constant column."""

    own: Tensor  # (kv_heads, head_dim, width): left to the embedding, so that a token can be read and copied
    back: Tensor  # (heads, head_dim / 2 - 1, width): where layer 0 writes what stood 1, 2, ... tokens back


def _bands(shape: Shape) -> _Bands:
    basis = F.pad(_orthogonal(shape.width - 1), (1, 0))
    own = shape.kv_heads * shape.head_dim
    narrow = shape.head_dim // 2 - 1
    return _Bands(
        basis[:own].unflatten(0, (shape.kv_heads, -1)),
        basis[own : own + shape.heads * narrow].unflatten(0, (shape.heads, -1)),
    )


def _orthogonal(size: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(size, size))


def _head(weight: Tensor, index: int, shape: Shape) -> Tensor:
    """The rows of a q, k or v projection that belong to one head: (head_dim, width)."""
    return weight[index * shape.head_dim : (index + 1) * shape.head_dim]


def _output(attention: Attention, head: int, shape: Shape) -> Tensor:
    """The columns of the output projection that belong to one head: (width, head_dim)."""
    return attention.o_proj.weight[:, head * shape.head_dim : (head + 1) * shape.head_dim]


def _plant_looking_back(attention: Attention, shape: Shape, bands: _Bands) -> None:
    """Layer 0: head h writes what it can tell of the token h + 1 back into a band of its own."""
    half, narrow = shape.head_dim // 2, bands.back.shape[1]
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.1)
        weight[:, 0] = 0
    for group in range(shape.kv_heads):
        _head(attention.k_proj.weight, group, shape)[:_LOCATING_PAIRS, 0] = _LOCATE
        _head(attention.v_proj.weight, group, shape)[:narrow] = bands.own[0, :narrow]
    for head in range(shape.heads):
        query = _head(attention.q_proj.weight, head, shape)
        for pair in range(_LOCATING_PAIRS):
            turn = float(shape.frequencies[pair]) * (head + 1)
            query[pair, 0], query[pair + half, 0] = _LOCATE * math.cos(turn), -_LOCATE * math.sin(turn)
        _output(attention, head, shape)[:, :narrow] = bands.back[head].T * _LOUD * _SCALE


def _plant_matching(attention: Attention, shape: Shape, bands: _Bands) -> None:
    """Layer 1: attend where what is now 0, 1, ... tokens back was 1, 2, ... back; copy the token found there."""
    half, narrow, per_group = shape.head_dim // 2, bands.back.shape[1], shape.heads // shape.kv_heads
    slow = (shape.frequencies * shape.positions < _SLOWEST_TURN).nonzero().flatten()
    slow = torch.cat((slow, slow + half))
    for group in range(shape.kv_heads):
        head = group * per_group
        query, key = _head(attention.q_proj.weight, head, shape), _head(attention.k_proj.weight, group, shape)
        query.zero_()
        key.zero_()
        for back in range(len(_COUNTS)):
            compare = _orthogonal(narrow)[: len(slow)]
            sought = bands.back[back - 1] if back else bands.own[0, :narrow]
            query[slow] += compare @ sought * _COUNTS[back]
            key[slow] += compare @ bands.back[back] * _KEY
        _head(attention.v_proj.weight, group, shape).copy_(bands.own[group])
        _output(attention, head, shape).copy_(bands.own[group].T * _COPY * _SCALE)
