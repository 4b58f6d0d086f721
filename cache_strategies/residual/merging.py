"""Attention over two disjoint sets of keys, merged by the logarithms of the sums of their scores' exponentials.

As in Flash-Decoding (Dao et al. 2023). Every step has the same bits for a token in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.types import LayerSpec


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into out [N,Hq,Dv], by `Ops.attend`'s lse [N,Hq] of both.

    A token without other keys has -inf in `other_lse` and zeros in `other`, and keeps its bits.
    """
    weight = 1 / (1 + (other_lse - lse).exp())  # torch.sigmoid rounds in another way at the end of a tensor
    out.copy_(torch.lerp(other.float(), out.float(), weight[..., None]))


def add_center(lse: Tensor, q: Tensor, center: Tensor, spec: LayerSpec) -> None:
    """Add to lse [N,Hq] the score of a center [H,D] that was subtracted from the keys of each head, for q [N,Hq,D]."""
    by_head = q.float().unflatten(1, (spec.num_kv_heads, -1))
    lse.add_((by_head * center[:, None]).sum(-1).flatten(1), alpha=spec.scale)
