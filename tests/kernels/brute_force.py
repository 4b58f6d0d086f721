"""Attention by its definition, in float64: every query with every key, under a mask. Shares no code with kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.selfcheck.attention_case import AttentionCase
from kernels.types import LayerSpec

Keeps = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> does the strategy keep the key?

KEEPS: Mapping[str, Callable[[Any], Keeps]] = {  # built-in kinds, by their options; the model's own window comes on top
    "contiguous": lambda options: keep_all,
    "mirrored": lambda options: keep_all,
    "paged": lambda options: keep_all,
    "sliding_window": lambda options: lambda i, j: (j < options.sinks) | (i - j < options.window),
}


def keep_all(i: Tensor, j: Tensor) -> Tensor:
    return j == j


def visible_keys(spec: LayerSpec, length: int, keeps: Keeps = keep_all, *, first: int = 0) -> Tensor:
    """Return the mask [T - first, T] of the keys j that query i sees, from the query `first` on."""
    i, j = torch.arange(first, length)[:, None], torch.arange(length)[None]
    return (j <= i) & (i - j < (spec.window or length)) & keeps(i, j)


def visible_in_case(case: AttentionCase, row: int, head: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return (which of a row's keys a head keeps [S], the mask [n, S] of those that each of its n queries sees)."""
    which, positions = case.list_kept(row, head)
    n = case.rows[row].tokens
    query, key = torch.arange(len(which) - n, len(which))[:, None], torch.arange(len(which))
    mask = key <= query
    if window is not None:
        mask &= (query - key < window) | (key < case.layout.sinks)
    if case.spec.window is not None:
        mask &= positions[-n:, None] - positions < case.spec.window
    return which, mask


def attention(q: Tensor, k: Tensor, v: Tensor, spec: LayerSpec, mask: Tensor) -> Tensor:
    """q [N,Hq,D], k [T,H,D], v [T,H,Dv], mask [N,T] or [H,N,T] -> [N,Hq,Dv] float64, one query head after the other."""
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
