"""Attention by its definition, in float64: every query with every key, under a mask. Shares no code with kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.types import LayerSpec

Keeps = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> does the strategy keep the key?

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of attention over texts of this package


def keep_all(i: Tensor, j: Tensor) -> Tensor:
    """Keep every key: the model's own attention."""
    return j == j


def visible_keys(spec: LayerSpec, length: int, keeps: Keeps = keep_all, *, first: int = 0) -> Tensor:
    """Return the mask [T - first, T] of the keys j that query i sees, from the query `first` on."""
    i, j = torch.arange(first, length)[:, None], torch.arange(length)[None]
    return (j <= i) & (i - j < (spec.window or length)) & keeps(i, j)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: LayerSpec, mask: Tensor) -> Tensor:
    """Attend, one query head after the other: q [N,Hq,D], k [T,H,D], v [T,H,Dv] -> [N,Hq,Dv] float64.

    The mask is [N,T] or [H,N,T].
    """
    q, k, v = q.double(), k.double(), v.double()
    heads = []
    for head in range(spec.num_q_heads):
        kv_head = head * spec.num_kv_heads // spec.num_q_heads
        scores = q[:, head] @ k[:, kv_head].T * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask[kv_head]), -torch.inf)
        if spec.sink_logits is not None:
            sink = spec.sink_logits[head].double().expand(len(scores), 1)
            scores = torch.cat((scores, sink), 1)
        weights = scores.softmax(1)[:, : len(k)]
        heads.append(weights @ v[:, kv_head])
    return torch.stack(heads, 1)
