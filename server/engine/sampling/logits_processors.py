"""Processes logits before a token is drawn: penalties, biases, allowed and banned tokens, grammars.

Knows texts as token ids; neither requests nor how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.engine.ipc.messages import SamplingParams


class TokenHistory(NamedTuple):
    """The token ids of a text before the token that is drawn: prompt and output."""

    prompt: Sequence[int]
    output: Sequence[int]


EMPTY_HISTORY = TokenHistory((), ())


def needs_logits_processing(sampling: SamplingParams) -> bool:
    """Return whether penalties, logit_bias or allowed_token_ids change the logits."""
    return bool(sampling.logit_bias or sampling.allowed_token_ids) or has_penalties(sampling)


def has_penalties(sampling: SamplingParams) -> bool:
    """Return whether a frequency, presence or repetition penalty is set, so that the token history is needed."""
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    return penalties != (0, 0, 1)


def process_logits(
    logits: Tensor,
    sampling: SamplingParams,
    history: TokenHistory,
    banned: Collection[int] = (),
    allowed_by_grammar: NDArray[np.bool_] | None = None,
) -> Tensor:
    """Return new logits [V]: penalties applied, then logit_bias, then -inf for `banned` and not allowed tokens.

    The repetition penalty (Keskar et al. 2019) applies to tokens of prompt and output, OpenAI's frequency and presence
    penalties to those of the output. A logit that a penalty near 0 makes too large is clamped to its dtype's maximum.
    """
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        ids, _ = _count_tokens([*history.prompt, *history.output], logits)
        repeated = logits[ids]
        penalty = sampling.repetition_penalty
        largest = torch.finfo(logits.dtype).max
        logits[ids] = torch.where(repeated > 0, repeated / penalty, repeated * penalty).clamp_max(largest)
    if history.output and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = _count_tokens(history.output, logits)
        logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if sampling.logit_bias:
        biased, biases = zip(*sampling.logit_bias, strict=True)
        logits[list(biased)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if banned:
        logits[list(banned)] = -torch.inf
    if sampling.allowed_token_ids:
        allowed = torch.from_numpy(get_allowed_token_ids(sampling)).to(logits.device)
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, allowed, logits[allowed])
    if allowed_by_grammar is not None:
        logits.masked_fill_(torch.from_numpy(~allowed_by_grammar).to(logits.device), -torch.inf)
    return logits


def allow_only(sampling: SamplingParams, token: int) -> SamplingParams:
    """Return the parameters with which only this token can be drawn."""
    return msgspec.structs.replace(sampling, allowed_token_ids=np.array([token], np.int64).tobytes())


def get_allowed_token_ids(sampling: SamplingParams) -> NDArray[np.int64]:
    """Return `sampling.allowed_token_ids`, which holds 64-bit integers as bytes, as a writable array."""
    return np.frombuffer(sampling.allowed_token_ids, np.int64).copy()


def _count_tokens(tokens: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens [n], and how often each occurs [n] in the dtype and on the device of `like`."""
    ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    return torch.from_numpy(ids).to(like.device), torch.from_numpy(counts).to(like)
