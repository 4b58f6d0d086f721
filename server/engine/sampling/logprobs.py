"""Computes log-probabilities of tokens from the model's logits, before penalties and temperature. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from server.engine.ipc.messages import TokenLogprob

MAX_STEP_LOGITS = 1 << 24  # maximum number of logits scored in a step, as scoring takes several times their memory
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not support (as in vLLM)


def compute_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability and rank of each token [K] under logits [K, V], and the `top` likeliest tokens.

    A token that is among the likeliest has the same log-probability there.
    """
    logprobs = logits.log_softmax(-1, torch.float32).clamp_min(MIN_LOGPROB)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    best = logprobs.topk(min(top, logits.shape[1]), sorted=True)
    floats, ints = _copy_to_host(torch.cat((chosen, best.values), 1), torch.cat((ranks, best.indices), 1))
    return [
        TokenLogprob(token, logprob, rank, list(zip(ids, values, strict=True)))
        for token, (logprob, *values), (rank, *ids) in zip(tokens, floats, ints, strict=True)
    ]


def _copy_to_host(floats: Tensor, ints: Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """Return tensors [K, n] float32 and [K, n] int64 as lists, copied from the device in one transfer as int32."""
    if floats.device.type == "cpu":
        return floats.tolist(), ints.tolist()
    packed = torch.cat((floats.view(torch.int32), ints.int()), 1).cpu()
    first, second = packed.split(floats.shape[1], 1)
    return first.contiguous().view(torch.float32).tolist(), second.tolist()


def compute_row_logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Return the log-probability of tokens[i] under logits[rows[i]] with its tops[i] likeliest tokens.

    None for tokens whose `tops` is None.
    """
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    requested = {i: top for i, top in enumerate(tops) if top is not None}
    if requested:
        found = compute_logprobs(
            logits[[rows[i] for i in requested]], [tokens[i] for i in requested], max(requested.values())
        )
        for (i, top), logprob in zip(requested.items(), found, strict=True):
            logprobs[i] = msgspec.structs.replace(logprob, top_logprobs=logprob.top_logprobs[:top])
    return logprobs
