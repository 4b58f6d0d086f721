"""Chooses which keys stay, from their scores: the protected ones, then those with the highest scores.

Knows neither layers nor memory. Ties are decided alike wherever a text is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAFEGUARD = 0.2  # share of the budget that each head keeps in any case (`alpha` of Ada-KV, arXiv:2407.11550)


def protect(scores: Tensor, positions: Tensor, length: int, sinks: int, recent: int) -> Tensor:
    """Return scores [..., S] float32: infinite for sinks and recent tokens, finite for all others, NaN the highest."""
    highest = torch.finfo(torch.float32).max
    is_protected = (positions < sinks) | (positions >= length - recent)
    return scores.float().nan_to_num(highest, highest, -highest).masked_fill(is_protected, torch.inf)


def select_top(scores: Tensor, count: int) -> Tensor:
    """Return the indices [..., count], ascending, of the keys with the highest scores [..., S]."""
    S = scores.shape[-1]
    dropped = scores.topk(S - count, dim=-1, largest=False, sorted=False).indices  # sorting what stays takes longer
    stays = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, dropped, False)
    indices = torch.arange(S, device=scores.device).expand_as(scores)
    return indices.masked_select(stays).view(*scores.shape[:-1], count)


def share_budget(scores: Sequence[Tensor], budget: int) -> list[int]:
    """Return how many keys each head keeps if heads with scores [S] share `budget` keys for each (Ada-KV).

    Each head keeps its best keys up to the safeguard; the others are those with the highest scores of all heads.
    """
    sizes = [len(each) for each in scores]
    total = min(budget * len(scores), sum(sizes))
    safe = int(SAFEGUARD * budget)
    lifted = []
    for each in scores:
        best = each.topk(min(safe, len(each)), sorted=False).indices
        lifted.append(each.index_fill(0, best, torch.inf))
    chosen = torch.cat(lifted).topk(total, sorted=False).indices
    heads = torch.repeat_interleave(
        torch.arange(len(sizes), device=chosen.device), torch.tensor(sizes, device=chosen.device)
    )
    counts: list[int] = heads[chosen].bincount(minlength=len(sizes)).tolist()
    return counts
