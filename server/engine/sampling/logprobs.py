"""Log-probabilities of tokens, by the model's own logits. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from server.engine.ipc.messages import TokenLogprob

MAX_STEP_LOGITS = 1 << 24  # scored in a step; they need this memory a few times over
MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have (as in vLLM)


def compute_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token [K] under logits [K, V], beside the `top` likeliest.

    A token that is among these has the same number there.
    """
    logprobs = logits.log_softmax(-1, torch.float32).clamp_min(MIN_LOGPROB)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    best = logprobs.topk(min(top, logits.shape[1]), sorted=True)
    numbers, counts = _copy_to_host(torch.cat((chosen, best.values), 1), torch.cat((ranks, best.indices), 1))
    return [
        TokenLogprob(token, logprob, rank, list(zip(ids, values, strict=True)))
        for token, (logprob, *values), (rank, *ids) in zip(tokens, numbers, counts, strict=True)
    ]


def _copy_to_host(numbers: Tensor, counts: Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """[K, n] float32 and [K, n] int64; from elsewhere in one transfer: the bits of the first beside the second."""
    if numbers.device.type == "cpu":
        return numbers.tolist(), counts.tolist()
    together = torch.cat((numbers.view(torch.int32), counts.int()), 1).cpu()
    first, second = together.split(numbers.shape[1], 1)
    return first.contiguous().view(torch.float32).tolist(), second.tolist()


def compute_row_logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Return `compute_logprobs` of each row, with the `top` of its token; None for those that want nothing."""
    told: list[TokenLogprob | None] = [None] * len(tokens)
    wanted = {i: top for i, top in enumerate(tops) if top is not None}
    if wanted:
        found = compute_logprobs(logits[[rows[i] for i in wanted]], [tokens[i] for i in wanted], max(wanted.values()))
        for (i, top), score in zip(wanted.items(), found, strict=True):
            told[i] = msgspec.structs.replace(score, top_logprobs=score.top_logprobs[:top])
    return told
