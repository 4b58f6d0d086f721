"""Computes a step: a forward pass over the scheduled rows, the tokens drawn from its logits, and log-probabilities.

Changes no request and no cache, so that a step that fails can be computed again, as a whole or row by row. Knows
neither the scheduler's queues nor where the tokens are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import Row
from kernels.sampling import Sample
from server.engine.batch import Batch, Work
from server.engine.ipc.messages import PromptScores, TokenLogprob
from server.engine.sampling.rejection_sampler import SampleResult, VerifiedRequest, drawn, scored
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import Scheduled
from server.engine.stats import prompt_scores
from server.models.base import Model


class StepOutput(NamedTuple):
    """The results of a forward pass, before anything of it has been committed."""

    batch: Batch
    scheduled: Sequence[Scheduled]  # in the order of the batch
    turns: Sequence[VerifiedRequest]  # of the rows that end their text
    siblings: Mapping[Request, Sequence[VerifiedRequest]]  # other choices of a prompt that ends in this step
    taken: Mapping[Request, SampleResult]  # tokens of turns and siblings; none for requests that want no token
    logprobs: Mapping[Request, list[TokenLogprob] | None]  # of these tokens
    prompt_scores: Mapping[Request, PromptScores]

    def entered(self) -> list[int]:
        """Return the number of tokens of each row that enter its cache: of a draft, the accepted ones only."""
        return [s.num_tokens + (self.taken[s.request].accepted if s.draft else 0) for s in self.scheduled]


class ModelRunner:
    """Runs a model on scheduled rows."""

    def __init__(self, model: Model, sample: Sample) -> None:
        self._model = model
        self._sample = sample

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        """Compute the rows of a step. Raises StrategyError, or whatever the model or the sampler raises."""
        batch = Batch([_work(s) for s in scheduled], self._model.device)
        logits = self._model.forward(batch.ids, batch)
        ordered = [scheduled[i] for i in batch.order]
        ends = list(accumulate(batch.logit_counts))
        turns = [
            VerifiedRequest(request, draft, end - 1 - len(draft))
            for (request, num_tokens, draft), end in zip(ordered, ends, strict=True)
            if num_tokens == request.remaining
        ]
        siblings = {turn.request: _siblings(turn) for turn in turns}
        drawing = _generating(turns, siblings)
        taken = drawn(drawing, logits, self._model.facts.eos_ids, self._sample)
        logprobs = dict(zip((turn.request for turn in drawing), scored(drawing, taken, logits), strict=True))
        of_prompts = _prompt_scores(ordered, batch.logit_counts, ends, logits)
        return StepOutput(batch, ordered, turns, siblings, taken, logprobs, of_prompts)


def _generating(
    turns: Sequence[VerifiedRequest], siblings: Mapping[Request, Sequence[VerifiedRequest]]
) -> list[VerifiedRequest]:
    """Return the turns whose request wants a token; requests with max_tokens 0 want their prompt computed only."""
    every = [*turns, *(turn for others in siblings.values() for turn in others)]
    return [turn for turn in every if turn.request.sampling.max_tokens]


def _work(scheduled: Scheduled) -> Work:
    request, num_tokens, draft = scheduled
    assert request.seat is not None
    first = request.seat.length
    tokens = [*request.tokens[first : first + num_tokens], *draft]
    logits = num_tokens if request.unscored else int(num_tokens == request.remaining) + len(draft)
    return Work(request.cache, Row(request.seat, len(tokens)), tokens, logits)


def _siblings(turn: VerifiedRequest) -> list[VerifiedRequest]:
    """Return turns of the other choices that wait for this prompt; they draw from the same logits."""
    if turn.request.generated:
        return []
    return [VerifiedRequest(r, (), turn.first) for r in turn.request.siblings if r.held_back and r.seat is None]


def _prompt_scores(
    scheduled: Sequence[Scheduled], counts: Sequence[int], ends: Sequence[int], logits: Tensor
) -> dict[Request, PromptScores]:
    return {
        request: prompt_scores(request, num_tokens, logits[end - count : end])
        for (request, num_tokens, _), count, end in zip(scheduled, counts, ends, strict=True)
        if request.unscored
    }
