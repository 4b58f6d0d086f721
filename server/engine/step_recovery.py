"""Runs a step so that a failure ends as few requests as possible.

If a strategy fails, the step is repeated; if anything else fails, its rows run one by one. Changes no request and no
cache: the caller commits each result before the next is computed. Knows neither the scheduler's queues nor where errors
are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cache_strategies.base import Seat
from server.engine.batch import StrategyError
from server.engine.model_runner import ModelRunner, StepOutput
from server.engine.scheduling.request import Request
from server.engine.scheduling.scheduler import Scheduled
from server.engine.stats import make_step_parts
from server.engine.warmup import run_dummy_step
from server.models.base import Model
from server.records import StepPart

log = logging.getLogger(__name__)

STEP_FAILED = "computing this request failed ({}); the server's log has the cause; other requests go on"


class RowsComputed(NamedTuple):
    """Rows of a step that were computed and can be committed."""

    parts: Mapping[str, StepPart]  # by instance
    output: StepOutput


class StrategyFailed(NamedTuple):
    """A strategy's code raised. Its rows are repeated, or end with RequestsFailed the second time."""

    instance: str


class RequestsFailed(NamedTuple):
    """Requests that end with an error: its message, and the code for clients."""

    requests: Sequence[Request]
    message: str
    code: str


RowsResult = RowsComputed | StrategyFailed | RequestsFailed


def run_step(runner: ModelRunner, model: Model, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
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
    yield from _run_one_by_one(runner, model, [s for s in scheduled if s.request.seat is not None])


def _run_together(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run the rows as one step; repeat it if a strategy fails, without that strategy's rows if it fails twice."""
    failed_before: set[str] = set()
    while scheduled:
        parts = make_step_parts(scheduled)  # before the forward pass, which evicts requests from the CPU's caches
        try:
            output = runner.execute(scheduled)
        except StrategyError as error:
            log.exception(
                "a strategy failed; %s",
                "its requests end with an error" if error.instance in failed_before else "the step is repeated",
            )
            yield StrategyFailed(error.instance)
            if error.instance in failed_before:
                failed = [s.request for s in scheduled if s.request.cache.name == error.instance]
                yield RequestsFailed(failed, f"{error}; other strategies go on", "strategy_failed")
                scheduled = [s for s in scheduled if s.request.cache.name != error.instance]
            failed_before.add(error.instance)
        else:
            yield RowsComputed(parts, output)
            return


def _run_one_by_one(runner: ModelRunner, model: Model, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run each row as a separate step; requests whose rows fail again end with an error.

    A row is skipped, and left to the next step, if its seat changed because an earlier row's request failed: it then
    has to compute shared blocks that the failed request was computing.
    """
    lengths = [_get_seat(s).length for s in scheduled]
    errors: list[Exception] = []
    all_failed = True
    for row, length in zip(scheduled, lengths, strict=True):
        if _get_seat(row).length != length or not row.request.cache.ready(_get_seat(row)):
            continue
        try:
            yield from _run_together(runner, [row])
        except Exception as error:
            log.exception("a request's row failed again when run alone; the request ends, and others go on")
            errors.append(error)
            yield RequestsFailed([row.request], STEP_FAILED.format(type(error).__name__), "step_failed")
        else:
            all_failed = False
    if errors and all_failed:
        _check_model(model, errors[-1])


def _check_model(model: Model, error: Exception) -> None:
    """Raise `error` if the model fails in a dummy step, too: then only a restart of the engine can help."""
    try:
        run_dummy_step(model, num_tokens=1, num_logits=1)
    except Exception:
        log.critical("the model also fails in a dummy step; the engine stops")
        raise error from None


def _get_seat(scheduled: Scheduled) -> Seat:
    seat = scheduled.request.seat
    assert seat is not None
    return seat
