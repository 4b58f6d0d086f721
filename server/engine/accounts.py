"""What is told of steps and of requests: rows by instance, a request's record, the scores of its prompt.

Knows neither who is told, nor what runs next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from server.engine.messages import PromptScores
from server.engine.report import Outcome, RequestRecord, StepPart
from server.engine.request import Request
from server.engine.scheduler import Scheduled
from server.engine.scores import scores


def parts_of(scheduled: Sequence[Scheduled]) -> dict[str, StepPart]:
    """The rows of a step, by instance."""
    counts: dict[str, list[int]] = {}  # decode rows, all rows, tokens
    for request, num_tokens, draft in scheduled:
        count = counts.setdefault(request.cache.name, [0, 0, 0])
        count[0] += num_tokens == 1 and request.generated > 0
        count[1] += 1
        count[2] += num_tokens + len(draft)
    return {name: StepPart(decode, rows - decode, tokens) for name, (decode, rows, tokens) in counts.items()}


def record_of(request: Request, outcome: Outcome) -> RequestRecord:
    """What is remembered of a request that leaves now."""
    times, now = request.times, time.monotonic()

    def between(start: float, end: float) -> float | None:
        return end - start if start and end else None

    return RequestRecord(
        instance=request.cache.name,
        reason=request.reason,
        outcome=outcome,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        miss=request.miss,
        forked=request.forked,
        generated_tokens=request.generated,
        drafted_tokens=request.drafted_tokens,
        accepted_tokens=request.accepted_tokens,
        preemptions=request.preemptions,
        kv_bytes=request.cache.bytes_for(len(request.tokens)) if times.admitted else 0,
        queue_seconds=between(times.arrived, times.admitted),
        prefill_seconds=between(times.admitted, times.first_token),
        decode_seconds=between(times.first_token, times.last_token),
        first_token_seconds=between(times.arrived, times.first_token),
        total_seconds=now - times.arrived,
    )


def prompt_scores(request: Request, logits: Tensor) -> PromptScores:
    """How likely the tokens of the prompt are that stand one behind those of the row; logits [row, V]."""
    seat, wanted = request.seat, request.sampling.prompt_logprobs
    assert seat is not None
    assert wanted is not None
    first = seat.length - len(logits) + 1
    start = max(first, request.scored + 1)  # what is computed once more has been told
    tokens = request.tokens[start : min(seat.length + 1, request.prompt_tokens)]
    request.scored += len(tokens)
    return PromptScores(request.key[1], scores(logits[start - first :][: len(tokens)], tokens, wanted))
