"""The options of `quest`, and how many blocks they let a query read. Knows numbers of blocks only."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from cache_strategies.paged.base import PagedOptions
from cache_strategies.token_budget import TokenBudget
from kernels.types import LayerSpec

NUM_FIRST, NUM_LAST = 1, 2  # blocks at the beginning and at the end of a text that every query reads
NUM_PROTECTED = NUM_FIRST + NUM_LAST  # the last one is being written; the one before it has the latest full summary


class QuestOptions(PagedOptions):
    """Options of a quest cache: those of a paged one, and how much of its text a decoded token reads."""

    budget: TokenBudget = Field(
        0.125, description="keys that a decoded token reads: a number of tokens, or a share of the text (below 1)"
    )
    min_tokens: int = Field(512, ge=1, description="least number of tokens that are read if the budget is a share")

    @model_validator(mode="after")
    def _check_protected(self) -> QuestOptions:
        name, tokens = ("budget", self.budget) if isinstance(self.budget, int) else ("min_tokens", self.min_tokens)
        least = (NUM_PROTECTED + 1) * self.block_size
        if tokens < least:
            raise ValueError(
                f"{name}={tokens} leaves nothing to choose: every query reads {NUM_PROTECTED} blocks of "
                f"block_size={self.block_size} tokens, the first one and the last {NUM_LAST}; raise {name} to {least} "
                "or more, or lower block_size"
            )
        return self

    def count_read(self, num_blocks: int, block_size: int) -> int:
        """Return how many blocks a query reads of a text of `num_blocks` blocks, the one being written included."""
        if isinstance(self.budget, int):
            return min(num_blocks, self.budget // block_size)
        return min(num_blocks, max(self.min_tokens // block_size, math.ceil(self.budget * num_blocks)))


def selects_in(spec: LayerSpec) -> bool:
    """Return whether queries of a layer select blocks: layers with a window of their own keep that instead."""
    return spec.window is None
