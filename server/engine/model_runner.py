"""Runs the model on the rows of a step, then samples tokens and log-probabilities for its requests.

Changes no request and no cache, so that a failed step can be computed again, as a whole or row by row. Knows neither
the scheduler's queues nor where the tokens are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from cache_strategies.base import Row
from kernels.tracing import Tracer
from server.engine.batch import Batch, RowInput
from server.engine.sampling.sampler import PromptInput, Sampler, SamplerInput, SamplerOutput
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import Scheduled
from server.models.base import Model


class StepOutput(NamedTuple):
    """The results of a forward pass that has not been committed yet."""

    batch: Batch
    scheduled: Sequence[Scheduled]  # in the order of the batch
    ended: Sequence[SamplerInput]  # requests whose rows reach the end of their tokens, so that a new one is sampled
    siblings: Mapping[Request, Sequence[SamplerInput]]  # for each of `ended`, the other choices that wait to fork it
    sampled: SamplerOutput  # for the requests of `ended` and `siblings`, except those with max_tokens=0

    def count_entered_tokens(self) -> list[int]:
        """Return the number of tokens of each row to commit; rejected draft tokens do not count."""
        results = self.sampled.results
        return [s.num_tokens + (results[s.request].num_accepted if s.draft else 0) for s in self.scheduled]


class ModelRunner:
    """Runs a model on the rows of a step, and a sampler on its logits."""

    def __init__(self, model: Model, sampler: Sampler, tracer: Tracer | None = None) -> None:
        self._model = model
        self._sampler = sampler
        self._tracer = tracer or Tracer()

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        """Compute the rows of a step. Raises StrategyError, and any exception of the model or the sampler."""
        rows = [_make_row_input(s) for s in scheduled]
        with self._tracer.span("plan"):
            batch = Batch(rows, self._model.device)
        with self._tracer.span("forward"):
            logits = self._model.forward(batch.input_ids, batch)
        ordered = [scheduled[i] for i in batch.row_order]
        ends = list(accumulate(batch.logit_counts))
        ended = [
            SamplerInput(request, draft, end - 1 - len(draft))
            for (request, num_tokens, draft), end in zip(ordered, ends, strict=True)
            if num_tokens == request.num_remaining_tokens
        ]
        siblings = {each.request: _find_waiting_siblings(each) for each in ended}
        prompts = [
            PromptInput(request, slice(end - num_tokens, end))
            for (request, num_tokens, _), end in zip(ordered, ends, strict=True)
            if request.needs_prompt_logprobs
        ]
        inputs = [*ended, *(sibling for others in siblings.values() for sibling in others)]
        inputs = [each for each in inputs if each.request.sampling.max_tokens]
        with self._tracer.span("sample_and_verify"):
            sampled = self._sampler.sample(logits, inputs, prompts)
        return StepOutput(batch, ordered, ended, siblings, sampled)


def _make_row_input(scheduled: Scheduled) -> RowInput:
    request, num_tokens, draft = scheduled
    assert request.seat is not None
    first = request.seat.length
    tokens = [*request.tokens[first : first + num_tokens], *draft]
    logits = (
        num_tokens if request.needs_prompt_logprobs else int(num_tokens == request.num_remaining_tokens) + len(draft)
    )
    return RowInput(request.cache, Row(request.seat, len(tokens)), tokens, logits)


def _find_waiting_siblings(parent: SamplerInput) -> list[SamplerInput]:
    """Return the other choices (n > 1) that wait for a request's prompt; they are sampled from the same logits."""
    if parent.request.num_output_tokens:
        return []
    return [
        SamplerInput(sibling, (), parent.first_logit_row)
        for sibling in parent.request.siblings
        if sibling.waits_for_sibling and sibling.seat is None
    ]
