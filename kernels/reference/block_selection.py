"""The operation `select_blocks` in plain torch, and the checks of its arguments.

Knows no strategy: `cache_strategies/quest` says what summaries are and when blocks are selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import ANY, AT_LEAST_ONE, check, check_tensor


def select_blocks(out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> None:
    """Select blocks as `Ops.select_blocks` does."""
    check_select_blocks(out, q, summaries, candidates, counts)
    (S, H, C), K = candidates.shape, min(candidates.shape[2], out.shape[2])
    own, selected = counts.long()[:, None, None].unbind(-1)  # [S, 1, 1]
    number = torch.arange(C, device=q.device)
    is_own = number < own
    blocks = candidates.where(is_own, 0).long()
    bounds = compute_bounds(q, summaries[blocks.flatten()].view(S, H, C, summaries.shape[1])).masked_fill(
        ~is_own, -torch.inf
    )
    # The first ones of equal bounds, and a candidate before a place without one
    best = bounds.sort(dim=2, descending=True, stable=True).indices[..., :K]
    is_selected = torch.arange(K, device=q.device) < selected
    in_order = best.where(is_selected, C).sort(2).values
    ids = candidates.gather(2, in_order.clamp_max(max(0, C - 1)))
    out[..., :K] = ids.where(is_selected, out[..., :K])


def compute_bounds(q: Tensor, summaries: Tensor) -> Tensor:
    """Return the largest bound of each candidate for the query heads of a KV head, [S, H, C]; infinite instead of NaN.

    `summaries` are those of the candidates, [S, H, C, 2 D].
    """
    dtype = torch.promote_types(torch.promote_types(q.dtype, summaries.dtype), torch.float32)
    queries = q.to(dtype).unflatten(1, (summaries.shape[1], -1))  # [S, H, group, D]
    signed = torch.cat((queries.clamp_min(0), queries.clamp_max(0)), 3)
    bounds = (signed @ summaries.to(dtype).transpose(2, 3)).amax(2)
    return bounds.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


def check_select_blocks(out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> None:
    """Raise ValueError for wrong arguments of `Ops.select_blocks`. On a GPU this waits for the GPU, once."""
    name, integers, device = "select_blocks", (torch.int32,), q.device
    check_tensor(name, "q", q, (ANY, AT_LEAST_ONE, AT_LEAST_ONE))
    S, heads, D = q.shape
    check_tensor(name, "candidates", candidates, (S, AT_LEAST_ONE, ANY), integers, device)
    _, H, C = candidates.shape
    check(heads % H == 0, "select_blocks: {} query heads are not a multiple of {} KV heads", heads, H)
    check_tensor(name, "summaries", summaries, (AT_LEAST_ONE, 2 * D), device=device)
    check_tensor(name, "counts", counts, (S, 2), integers, device)
    check_tensor(name, "out", out, (S, H, ANY), integers, device)
    K, num_blocks = out.shape[2], len(summaries)
    own, selected = counts.unbind(1)
    is_own = torch.arange(C, device=device) < own[:, None, None]
    is_inside = (candidates >= 0) & (candidates < num_blocks) | ~is_own
    fits = (selected >= 0) & (selected <= own) & (own <= C) & (selected <= K)
    counts_fit, ids_fit = torch.stack([fits.all(), is_inside.all()]).tolist()
    check(counts_fit, "select_blocks: counts do not fit {} candidates and {} columns of out", C, K)
    check(ids_fit, "select_blocks: candidates must be blocks from 0 to {}", num_blocks - 1)
