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
from server.engine.batch import Batch, RowInput
from server.engine.ipc.messages import PromptScores, TokenLogprob
from server.engine.sampling.rejection_sampler import (
    SampleResult,
    VerifiedRequest,
    compute_sample_logprobs,
    sample_and_verify,
)
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import Scheduled
from server.engine.stats import compute_prompt_logprobs
from server.models.base import Model


class StepOutput(NamedTuple):
    """The results of a forward pass, before anything of it has been committed."""

    batch: Batch
    scheduled: Sequence[Scheduled]  # in the order of the batch
    verified_requests: Sequence[VerifiedRequest]  # of the rows that end their text
    siblings: Mapping[Request, Sequence[VerifiedRequest]]  # other choices of a prompt that ends in this step
    sample_results: Mapping[Request, SampleResult]  # tokens of turns and siblings; none for requests that want no token
    logprobs: Mapping[Request, list[TokenLogprob] | None]  # of these tokens
    prompt_logprobs: Mapping[Request, PromptScores]

    def count_entered_tokens(self) -> list[int]:
        """Return the number of tokens of each row that enter its cache: of a draft, the accepted ones only."""
        return [s.num_tokens + (self.sample_results[s.request].num_accepted if s.draft else 0) for s in self.scheduled]


class ModelRunner:
    """Runs a model on scheduled rows."""

    def __init__(self, model: Model, sample: Sample) -> None:
        self._model = model
        self._sample = sample

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        """Compute the rows of a step. Raises StrategyError, or whatever the model or the sampler raises."""
        batch = Batch([_make_row_input(s) for s in scheduled], self._model.device)
        logits = self._model.forward(batch.input_ids, batch)
        ordered = [scheduled[i] for i in batch.row_order]
        ends = list(accumulate(batch.logit_counts))
        turns = [
            VerifiedRequest(request, draft, end - 1 - len(draft))
            for (request, num_tokens, draft), end in zip(ordered, ends, strict=True)
            if num_tokens == request.num_remaining_tokens
        ]
        siblings = {turn.request: _find_waiting_siblings(turn) for turn in turns}
        drawing = _select_generating(turns, siblings)
        taken = sample_and_verify(drawing, logits, self._model.info.eos_ids, self._sample)
        logprobs = dict(
            zip((turn.request for turn in drawing), compute_sample_logprobs(drawing, taken, logits), strict=True)
        )
        of_prompts = _compute_prompt_logprobs(ordered, batch.logit_counts, ends, logits)
        return StepOutput(batch, ordered, turns, siblings, taken, logprobs, of_prompts)


def _select_generating(
    turns: Sequence[VerifiedRequest], siblings: Mapping[Request, Sequence[VerifiedRequest]]
) -> list[VerifiedRequest]:
    """Return the turns whose request wants a token; requests with max_tokens 0 want their prompt computed only."""
    every = [*turns, *(turn for others in siblings.values() for turn in others)]
    return [turn for turn in every if turn.request.sampling.max_tokens]


def _make_row_input(scheduled: Scheduled) -> RowInput:
    request, num_tokens, draft = scheduled
    assert request.seat is not None
    first = request.seat.length
    tokens = [*request.tokens[first : first + num_tokens], *draft]
    logits = (
        num_tokens if request.needs_prompt_logprobs else int(num_tokens == request.num_remaining_tokens) + len(draft)
    )
    return RowInput(request.cache, Row(request.seat, len(tokens)), tokens, logits)


def _find_waiting_siblings(turn: VerifiedRequest) -> list[VerifiedRequest]:
    """Return turns of the other choices that wait for this prompt; they draw from the same logits."""
    if turn.request.num_output_tokens:
        return []
    return [
        VerifiedRequest(r, (), turn.first_logit_row)
        for r in turn.request.siblings
        if r.waits_for_sibling and r.seat is None
    ]


def _compute_prompt_logprobs(
    scheduled: Sequence[Scheduled], counts: Sequence[int], ends: Sequence[int], logits: Tensor
) -> dict[Request, PromptScores]:
    return {
        request: compute_prompt_logprobs(request, num_tokens, logits[end - count : end])
        for (request, num_tokens, _), count, end in zip(scheduled, counts, ends, strict=True)
        if request.needs_prompt_logprobs
    }
