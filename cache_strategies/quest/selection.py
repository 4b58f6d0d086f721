"""Which blocks rows may select, and how many: the arguments of `Ops.select_blocks` that all layers of a step share.

Knows no layers and no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.quest.options import NUM_FIRST, NUM_PROTECTED


class TextSizes(NamedTuple):
    """The lengths of a text in blocks, the one being written included."""

    num_blocks: int
    num_read: int  # how many of them a query reads


class Candidates(NamedTuple):
    """The blocks among which S rows select, each in H KV heads: all but the first one and the last two of a text.

    C is the number of candidates in the longest text.
    """

    blocks: Tensor  # [S, H, C] int32: their ids, in order; a row's own come first
    counts: Tensor  # [S, 2] int32: the number of a row's own candidates, and how many of them it selects


def make_candidates(blocks: Tensor, sizes: Sequence[TextSizes]) -> Candidates:
    """Return the candidates of rows with these sizes; `blocks` [S, H, M] int32 are the ids of all their blocks."""
    counts = [(each.num_blocks - NUM_PROTECTED, each.num_read - NUM_PROTECTED) for each in sizes]
    longest = max(own for own, _ in counts)
    return Candidates(
        blocks[:, :, NUM_FIRST : NUM_FIRST + longest],
        torch.tensor(counts, dtype=torch.int32, device=blocks.device),
    )
