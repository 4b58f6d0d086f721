"""What a draw is: how the next token of a text is chosen, and what that depends on. Data only; no tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from server.engine.ipc.messages import SamplingParams


class TokenHistory(NamedTuple):
    """The tokens before the one that is drawn."""

    prompt: Sequence[int]
    output: Sequence[int]


EMPTY_HISTORY = TokenHistory((), ())


class Draw(NamedTuple):
    """A token wanted: how, and at which position of its text it will stand."""

    sampling: SamplingParams
    position: int
    history: TokenHistory = EMPTY_HISTORY  # what stands before it, if that matters
    banned_token_ids: Collection[int] = ()  # tokens that may not come


def needs_logits_processing(sampling: SamplingParams) -> bool:
    """Return whether the text before a token, a bias, or a choice of tokens changes its logits."""
    return bool(sampling.logit_bias or sampling.allowed_token_ids) or has_penalties(sampling)


def has_penalties(sampling: SamplingParams) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    return penalties != (0, 0, 1)
