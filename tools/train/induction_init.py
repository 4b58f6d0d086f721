"""Initializes a model with a rough induction circuit, which training refines.

Recall needs heads that copy the preceding tokens to each token, and a later head that finds an earlier place with the
same preceding tokens and copies the token there (Olsson et al., arXiv 2209.11895). Training alone forms such circuits
only after millions of tokens. The result is an ordinary Llama with these weights set:

    embedding  one column is constant, so that a head can attend to a position whatever its token;
    layer 0    head h copies the token h + 1 positions back, found by the phases of RoPE, into its own band;
    layer 1    two heads attend to the token that followed the same last tokens, using only the slow RoPE pairs, which
               change little over distance, and copy it. They compare different random vectors and copy different
               parts, so that together they make fewer errors;
    elsewhere  output projections are zero, so every other head and every feed-forward contributes nothing at first.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.model import Attention, Llama, LlamaShape

_EMBEDDING_STD = 0.3  # standard deviation of the embedding: large, so that a few steps do not destroy the circuit
_LOGITS_STD = 0.8  # standard deviation of the logits, set by the last norm's weight
_CONSTANT = 4 * _EMBEDDING_STD  # of the constant column
_WRITE_GAIN = 3.5  # factor of layer 0's output, relative to the embedding
_LOCATE_GAIN = 3.0  # factor of layer 0's queries and keys: larger values make its attention sharper
_MATCH_WEIGHTS = (5.0, 1.2, 1.6, 1.6)  # of the current token, the one before, ... when layer 1 compares positions
_COPY_GAIN = 25.0  # factor of layer 1's output, relative to the embedding
_LOCATING_PAIRS = 6  # number of the fastest RoPE pairs, in which one position is a large rotation
_SLOW_TURN = 1.5  # radians that a "slow" RoPE pair rotates over all positions, at most


@torch.no_grad()
def init_induction_heads(model: Llama) -> None:
    """Initialize a model with the induction circuit of this module. Draws from torch's global generator."""
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
    """Orthogonal subspaces of the residual stream, each without the constant column."""

    own: Tensor  # (kv_heads, head_dim, width): of the embedding, from which tokens are read and copied
    back: Tensor  # (heads, head_dim / 2 - 1, width): to which layer 0 writes the tokens 1, 2, ... positions back


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
    """Set layer 0 so that head h writes a projection of the token h + 1 positions back into its own band."""
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
    """Set layer 1 so that it attends to tokens that follow the same tokens as the next one will, and copies them."""
    half, narrow, per_group = shape.head_dim // 2, bands.back.shape[1], shape.heads // shape.kv_heads
    slow_dims = (shape.frequencies * shape.positions < _SLOW_TURN).nonzero().flatten()
    slow_dims = torch.cat((slow_dims, slow_dims + half))
    assert len(slow_dims) <= narrow, "the slow RoPE pairs have more dimensions than a band"
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
