"""The planted initialisation: an induction circuit, roughly, for training to refine.

Recall needs heads that note what stood just before each token, and a later head that finds the place where the same
stood before what is sought, and copies what follows (Olsson et al., arXiv 2209.11895). Such circuits form late by
themselves: after millions of tokens. So one is planted; the result is an ordinary Llama. What is planted:

    embedding  one constant column, so that a head can look at a place whatever the token there;
    layer 0    head h copies the token h + 1 back, found by the phases of RoPE, into a band of its own;
    layer 1    two heads attend to the token that came after the same last tokens, using only the slow RoPE pairs,
               which hold over distance, and copy it. They differ in the random vectors they compare and in what
               they copy, so that together they err less;
    elsewhere  output projections are zero, so every other head and every feed-forward starts silent.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.model import Attention, Llama, LlamaShape

_EMBEDDING_STD = 0.3  # standard deviation of the embedding: large, so that a few steps do not undo what is planted
_LOGITS_STD = 0.8  # standard deviation of the logits, set by the last norm's weight
_CONSTANT = 4 * _EMBEDDING_STD  # of the constant column
_WRITE_GAIN = 3.5  # how loud layer 0 writes, against the embedding
_LOCATE_GAIN = 3.0  # how sharply layer 0 looks a few tokens back
_MATCH_WEIGHTS = (5.0, 1.2, 1.6, 1.6)  # how much the present token, the one before, ... count when layer 1 compares
_COPY_GAIN = 25.0  # how loud layer 1 writes what it found
_LOCATING_PAIRS = 6  # the fastest RoPE pairs: one token more or less is a large turn
_SLOW_TURN = 1.5  # radians a "slow" pair may turn over all positions


@torch.no_grad()
def init_induction_heads(model: Llama) -> None:
    """Initialise for early recall, as described above. Draws from torch's global generator."""
    shape = model.shape
    nn.init.normal_(model.embed_tokens.weight, std=_EMBEDDING_STD)
    model.embed_tokens.weight[:, 0] = _CONSTANT
    nn.init.constant_(model.norm.weight, _LOGITS_STD / (_EMBEDDING_STD * math.sqrt(shape.width)))
    for block in model.blocks:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    bands = _make_bands(shape)
    _init_previous_token_heads(model.blocks[0].self_attn, shape, bands)
    _init_matching_heads(model.blocks[1].self_attn, shape, bands)


class _Bands(NamedTuple):
    """Orthogonal parts of the residual stream, blind to the constant column."""

    own: Tensor  # (kv_heads, head_dim, width): left to the embedding, so that a token can be read and copied
    back: Tensor  # (heads, head_dim / 2 - 1, width): where layer 0 writes what stood 1, 2, ... tokens back


def _make_bands(shape: LlamaShape) -> _Bands:
    basis = F.pad(_make_orthogonal(shape.width - 1), (1, 0))
    own = shape.kv_heads * shape.head_dim
    narrow = shape.head_dim // 2 - 1
    assert own + shape.heads * narrow < shape.width, "the bands do not fit beside each other"
    return _Bands(
        basis[:own].unflatten(0, (shape.kv_heads, -1)),
        basis[own : own + shape.heads * narrow].unflatten(0, (shape.heads, -1)),
    )


def _make_orthogonal(size: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(size, size))


def _get_head_rows(weight: Tensor, index: int, shape: LlamaShape) -> Tensor:
    """Return the rows of a q, k or v projection that belong to one head: (head_dim, width)."""
    return weight[index * shape.head_dim : (index + 1) * shape.head_dim]


def _get_output_columns(attention: Attention, head: int, shape: LlamaShape) -> Tensor:
    """Return the columns of the output projection that belong to one head: (width, head_dim)."""
    return attention.o_proj.weight[:, head * shape.head_dim : (head + 1) * shape.head_dim]


def _init_previous_token_heads(attention: Attention, shape: LlamaShape, bands: _Bands) -> None:
    """Let head h of layer 0 write what it can tell of the token h + 1 back into a band of its own."""
    half, narrow = shape.head_dim // 2, bands.back.shape[1]
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.1)
        weight[:, 0] = 0
    for group in range(shape.kv_heads):
        _get_head_rows(attention.k_proj.weight, group, shape)[:_LOCATING_PAIRS, 0] = _LOCATE_GAIN
        _get_head_rows(attention.v_proj.weight, group, shape)[:narrow] = bands.own[0, :narrow]
    for head in range(shape.heads):
        query = _get_head_rows(attention.q_proj.weight, head, shape)
        for pair in range(_LOCATING_PAIRS):
            turn = float(shape.frequencies[pair]) * (head + 1)
            query[pair, 0], query[pair + half, 0] = _LOCATE_GAIN * math.cos(turn), -_LOCATE_GAIN * math.sin(turn)
        _get_output_columns(attention, head, shape)[:, :narrow] = bands.back[head].T * _WRITE_GAIN * _EMBEDDING_STD


def _init_matching_heads(attention: Attention, shape: LlamaShape, bands: _Bands) -> None:
    """Let layer 1 attend where what is now 0, 1, ... tokens back was 1, 2, ... back, and copy the token there."""
    half, narrow, per_group = shape.head_dim // 2, bands.back.shape[1], shape.heads // shape.kv_heads
    slow_dims = (shape.frequencies * shape.positions < _SLOW_TURN).nonzero().flatten()
    slow_dims = torch.cat((slow_dims, slow_dims + half))
    assert len(slow_dims) <= narrow, "fewer dimensions to compare in than to compare"
    for group in range(shape.kv_heads):
        head = group * per_group
        query, key = (
            _get_head_rows(attention.q_proj.weight, head, shape),
            _get_head_rows(attention.k_proj.weight, group, shape),
        )
        query.zero_()
        key.zero_()
        for back in range(shape.heads):
            projection = _make_orthogonal(narrow)[: len(slow_dims)]
            sought = bands.back[back - 1] if back else bands.own[0, :narrow]
            query[slow_dims] += projection @ sought * _MATCH_WEIGHTS[back]
            key[slow_dims] += projection @ bands.back[back]
        _get_head_rows(attention.v_proj.weight, group, shape).copy_(bands.own[group])
        _get_output_columns(attention, head, shape).copy_(bands.own[group].T * _COPY_GAIN * _EMBEDDING_STD)
