"""Computes a step: runs the model on its rows, then samples tokens and log-probabilities for its requests.

Changes no request and no cache, so that a failed step can be computed again: as a whole if a strategy failed, else row
by row, so that as few requests as possible end with an error. The caller commits each result before the next is
computed. Knows neither the scheduler's queues nor where tokens and errors are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.errors import StrategyError
from kernels.tracing import Tracer
from server.engine.batch import Batch, RowInput
from server.engine.sampling.sampler import PromptInput, Sampler, SamplerInput, SamplerOutput
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import update_length
from server.engine.scheduling.step import RequestFailure, Scheduled
from server.engine.stats import make_step_parts
from server.engine.warmup import run_dummy_step
from server.models.base import Model
from server.records import StepPart

log = logging.getLogger(__name__)

STEP_FAILED = "computing this request failed ({}); the server's log has the cause; other requests go on"


class StepOutput(NamedTuple):
    """The results of a forward pass that has not been committed yet."""

    batch: Batch
    parts: Mapping[str, StepPart]  # numbers of rows and tokens by instance, those of extensions left out
    scheduled: Sequence[Scheduled]  # the rows of the step, in the order of the batch
    to_sample: Sequence[SamplerInput]  # requests whose rows reach the end of their tokens, so that a new one is sampled
    # For requests of `to_sample` with such: the other choices (n > 1) that wait to fork their sequences
    siblings: Mapping[Request, Sequence[SamplerInput]]
    sampled: SamplerOutput  # new tokens of the requests in `to_sample` and `siblings`, except those with max_tokens=0
    logits: Tensor  # [K, V], to which the rows of `to_sample` and `siblings` refer
    observed: Mapping[Request, Tensor]  # by request of an extension: the logits [n, V] after its row's last n tokens
    failed: Sequence[RequestFailure] = ()  # requests that have to end, found after the step was committed

    def without(self, requests: Collection[Request]) -> StepOutput:
        """Return the results without those of some requests."""
        return self._replace(
            scheduled=[s for s in self.scheduled if s.request not in requests],
            to_sample=[each for each in self.to_sample if each.request not in requests],
        )

    def count_entered_tokens(self) -> list[int]:
        """Return the number of tokens of each row to commit; rejected drafts do not count, nor any of an extension."""
        results = self.sampled.results
        return [
            s.num_tokens + (results[s.request].num_accepted if s.draft and s.num_observed is None else 0)
            for s in self.scheduled
        ]


class ModelRunner:
    """Runs a model on the rows of a step, and a sampler on its logits."""

    def __init__(self, model: Model, sampler: Sampler, tracer: Tracer | None = None) -> None:
        self.model = model
        self.tracer = tracer or Tracer()
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        """Compute a step's rows and sample tokens. Raises StrategyError, and any exception of the model."""
        # Rows are counted before the forward pass: afterwards the requests are no longer in the CPU's caches.
        parts = make_step_parts(scheduled)
        rows = [_make_row_input(s) for s in scheduled]
        with self.tracer.span("plan"):
            batch = Batch(rows, self.model.device, self.tracer)
        with self.tracer.span("forward"):
            logits = self._forward(batch)
        ordered = [scheduled[i] for i in batch.row_order]
        ends = list(accumulate(batch.logit_counts))
        to_sample: list[SamplerInput] = []
        prompts: list[PromptInput] = []
        observed: dict[Request, Tensor] = {}
        for (request, num_tokens, draft, samples, scores_prompt, num_observed), end in zip(ordered, ends, strict=True):
            if num_observed is not None:
                observed[request] = logits[end - num_observed : end]
                continue
            if samples:
                to_sample.append(SamplerInput(request, draft, end - 1 - len(draft)))
            if scores_prompt:
                prompts.append(PromptInput(request, slice(end - num_tokens, end)))
        parents = [each for each in to_sample if len(each.request.siblings) > 1 and not each.request.num_output_tokens]
        siblings = {each.request: found for each in parents if (found := _find_waiting_siblings(each))}
        inputs = [*to_sample, *(sibling for others in siblings.values() for sibling in others)]
        inputs = [each for each in inputs if each.request.sampling.max_tokens]
        with self.tracer.span("sample_and_verify"):
            sampled = self._sampler.sample(logits, inputs, prompts)
        return StepOutput(batch, parts, ordered, to_sample, siblings, sampled, logits, observed)

    def _forward(self, batch: Batch) -> Tensor:
        """Compute a batch's logits. Raises StrategyError if the cause of a failure is a strategy, else the failure."""
        try:
            return self.model.forward(batch.input_ids, batch)
        except StrategyError:
            raise
        except Exception:
            batch.check_located()
            raise

    def run_dummy_step(self) -> None:
        """Compute a step of one token without any request, to test the model. Raises what the model raises."""
        run_dummy_step(self.model, num_tokens=1, num_logits=1)


def _make_row_input(scheduled: Scheduled) -> RowInput:
    request, num_tokens, draft, samples, scores_prompt, num_observed = scheduled
    sequence, length = request.sequence, request.num_computed_tokens
    assert sequence is not None
    tokens = [*request.tokens[length : length + num_tokens], *draft]
    num_logits = num_tokens if scores_prompt else samples + len(draft)
    num_logits = num_logits if num_observed is None else num_observed
    return RowInput(request.instance, sequence, length, tokens, num_logits, len(draft))


def _find_waiting_siblings(parent: SamplerInput) -> list[SamplerInput]:
    """Return the other choices (n > 1) that wait for the parent's prompt; they are sampled from the same logits."""
    return [
        SamplerInput(sibling, (), parent.first_logit_row)
        for sibling in parent.request.siblings
        if sibling.waits_for_sibling and sibling.sequence is None
    ]


# ---------------------------------------------------------------- steps that fail
RowsResult = StepOutput | Sequence[RequestFailure]


def run_step(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run the rows of a step together or, if that fails outside of a strategy, one by one; yield the results.

    Each result is yielded before the next is computed. If every row fails alone and the model cannot even compute a
    dummy step, the last row's exception is raised.
    """
    try:
        yield from _run_together(runner, scheduled)
    except Exception:
        log.exception("a step of %d rows failed; its rows run again one by one", len(scheduled))
    else:
        return
    yield from _run_one_by_one(runner, [s for s in scheduled if s.request.sequence is not None])


def _run_together(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run the rows as one step; repeat it if a strategy fails, without that strategy's rows if it fails twice."""
    failed_before: set[str] = set()
    while scheduled:
        try:
            output = runner.execute(scheduled)
        except StrategyError as error:
            log.error(
                "%s; %s",
                error,
                "its requests end with an error" if error.instance in failed_before else "the step is repeated",
            )
            if error.instance in failed_before:
                failed = _choose_failed(scheduled, error.instance)
                if not failed:
                    raise
                # Before the others run, as a failed request may get another cache
                scheduled = [s for s in scheduled if s.request not in failed]
                yield [RequestFailure.from_fault(request, error) for request in failed]
                # An extension's row may have ended with the request that it belongs to
                scheduled = [s for s in scheduled if s.request.sequence is not None]
            failed_before.add(error.instance)
        else:
            yield output
            return


def _choose_failed(scheduled: Sequence[Scheduled], instance: str) -> list[Request]:
    """Return the requests that end after repeated faults of an instance: only those of extensions, if it has any."""
    own = [s for s in scheduled if s.request.instance.name == instance]
    return [s.request for s in own if s.num_observed is not None] or [s.request for s in own]


def _run_one_by_one(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run each row as a separate step; requests whose rows fail again end with an error.

    A row is skipped, and left to the next step, if its sequence changed because an earlier row's request failed: it
    then has to compute shared blocks that the failed request was computing. Rows of extensions may end with their
    requests.
    """
    errors: list[Exception] = []
    all_failed = True
    for instance in {row.request.instance for row in scheduled}:
        instance.poll()  # ends what was promised to rows of the same step
    for row in scheduled:
        try:
            if row.request.sequence is None or not _is_unchanged(row.request):
                continue
            yield from _run_together(runner, [row])
        except Exception as error:
            log.exception("a request's row failed again when run alone; the request ends, and others go on")
            errors.append(error)
            yield [RequestFailure(row.request, STEP_FAILED.format(type(error).__name__), "step_failed")]
        else:
            all_failed = False
    if errors and all_failed:
        try:
            runner.run_dummy_step()
        except Exception:
            log.critical("the model also fails in a dummy step; the engine stops")
            raise errors[-1] from None


def _is_unchanged(request: Request) -> bool:
    """Return whether a request's row is what it was when it was scheduled. Raises StrategyError."""
    if request.has_committed:
        return True
    length = request.num_computed_tokens
    with request.instance.guard["schedule"]:
        return update_length(request) and request.num_computed_tokens == length
