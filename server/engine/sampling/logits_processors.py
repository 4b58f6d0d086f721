"""Processes logits before a token is drawn: penalties, biases, allowed and banned tokens.

Knows texts as token ids, and neither requests nor how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.engine.ipc.messages import SamplingParams


class TokenHistory(NamedTuple):
    """The tokens of a text before the one that is drawn."""

    prompt: Sequence[int]
    output: Sequence[int]


EMPTY_HISTORY = TokenHistory((), ())


def needs_logits_processing(sampling: SamplingParams) -> bool:
    """Return whether penalties, a bias or allowed tokens change the logits."""
    return bool(sampling.logit_bias or sampling.allowed_token_ids) or has_penalties(sampling)


def has_penalties(sampling: SamplingParams) -> bool:
    """Return whether the tokens before a token change its logits."""
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    return penalties != (0, 0, 1)


def process_logits(
    logits: Tensor, sampling: SamplingParams, text: TokenHistory, banned: Collection[int] = ()
) -> Tensor:
    """Return logits [V] with penalties, then the bias, then -inf for `banned` tokens and those not allowed.

    Repetition (Keskar et al. 2019) counts prompt and output, the other two (OpenAI's) the output alone. A logit that
    a penalty near 0 makes too large for its type stays the largest there is.
    """
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        ids, _ = _count_tokens([*text.prompt, *text.output], logits)
        chosen = logits[ids]
        penalty = sampling.repetition_penalty
        largest = torch.finfo(logits.dtype).max
        logits[ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty).clamp_max(largest)
    if text.output and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = _count_tokens(text.output, logits)
        logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if sampling.logit_bias:
        biased, by = zip(*sampling.logit_bias, strict=True)
        logits[list(biased)] += torch.tensor(by, dtype=logits.dtype, device=logits.device)
    if banned:
        logits[list(banned)] = -torch.inf
    if sampling.allowed_token_ids:
        allowed = torch.from_numpy(get_allowed_token_ids(sampling)).to(logits.device)
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, allowed, logits[allowed])
    return logits


def get_allowed_token_ids(sampling: SamplingParams) -> NDArray[np.int64]:
    """Return the token ids of `allowed_token_ids`, in an array that may be written to."""
    return np.frombuffer(sampling.allowed_token_ids, np.int64).copy()


def _count_tokens(tokens: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens, and the number of times that each occurs."""
    ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    return torch.from_numpy(ids).to(like.device), torch.from_numpy(counts).to(like)
