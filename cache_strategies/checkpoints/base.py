"""The interface of a checkpoint policy. Knows numbers of tokens; neither states nor memory.

A checkpoint is a copy of the recurrent states after the first tokens of a text. Another text with these tokens goes on
from it; tokens between its last checkpoint and the place where it differs are computed again. A checkpoint takes as
many bytes as thousands of tokens of keys, so where to keep one, and which to drop first, is a choice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OpenedText(NamedTuple):
    """What is known of a text when it is opened. Numbers of tokens are rounded down to whole blocks."""

    num_reusable: int  # tokens that the same prompt would find if it came again: all but the last
    num_shared: int  # tokens that another text has, too, which this one branches off from
    message_ends: Sequence[int]  # after how many tokens its messages end, ascending


class CheckpointUse(NamedTuple):
    """What is known of a checkpoint that no sequence uses any more."""

    num_tokens: int  # of the prefix
    num_saved: int  # tokens that would be computed again without it: those since the checkpoint before it
    num_displaced: int  # tokens whose keys and values take as much memory
    num_hits: int  # times that a text has gone on from it
    is_inner: bool  # whether a text that went on from it, or that made it, has a later checkpoint
    is_branch: bool  # whether a text had to be computed again up to here, as it parts from an earlier one


class CheckpointPolicy(ABC):
    """Chooses where checkpoints of a text are kept, and which checkpoint is dropped first."""

    def __init__(self, interval: int) -> None:
        """`interval` is the setting checkpoint_interval, in tokens, rounded up to whole blocks."""
        self.interval = interval

    @abstractmethod
    def place(self, text: OpenedText, first: int, end: int) -> Iterable[int]:
        """Return after how many tokens of a text to keep checkpoints: numbers in [first, end), in any order.

        Called for each row of the text, and again before a row is repeated: equal arguments give equal results.
        Other numbers are ignored, as are those that are not whole blocks: keys are found by whole blocks.
        """

    def weigh(self, checkpoint: CheckpointUse) -> float:
        """Return how many times as fast as a block of keys an unused checkpoint ages; the oldest of both is dropped.

        Weights are rounded to powers of two, from 2**-20 to 2**20. Called when a checkpoint is used no more, and when
        it becomes an inner one.

        By default one ages as keys do if several texts went on from it, or if it saves as many tokens as it displaces.
        An inner one of which neither is known is dropped first: most conversations only grow, and then their last
        checkpoint is worth all earlier ones.
        """
        if checkpoint.num_hits > 1 or checkpoint.num_saved >= checkpoint.num_displaced:
            return 1.0
        if not checkpoint.is_inner:
            return 2.0
        return 4.0 if checkpoint.is_branch else math.inf


class CheckpointOptions(NamedTuple):
    """Where an instance makes checkpoints, and how many it keeps."""

    policy: type[CheckpointPolicy]
    interval: int  # tokens
    share: str = "100%"  # most of the instance's memory that they take
