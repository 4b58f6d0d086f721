"""Runs a step so that a failure ends as few requests as possible: again if a strategy failed, else row by row.

Changes no request and no cache: the caller commits what was computed before it asks for more. Knows neither the
scheduler's queues nor where errors are sent.
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
    """Rows of a step that were computed and are to be committed."""

    parts: Mapping[str, StepPart]  # by instance
    output: StepOutput


class StrategyFailed(NamedTuple):
    """A strategy raised; its rows are repeated or given up."""

    instance: str


class RequestsFailed(NamedTuple):
    """Requests that end with an error."""

    requests: Sequence[Request]
    message: str
    code: str


RowsResult = RowsComputed | StrategyFailed | RequestsFailed


def run_step(runner: ModelRunner, model: Model, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run the rows of a step together or, if that fails outside of a strategy, one by one.

    Yield each result before anything else is computed. Raises what a row raised if the model cannot compute any more.
    """
    try:
        yield from _run_together(runner, scheduled)
    except Exception:
        log.exception("a step of %d rows failed; its rows run again one by one", len(scheduled))
    else:
        return
    yield from _run_one_by_one(runner, model, [s for s in scheduled if s.request.seat is not None])


def _run_together(runner: ModelRunner, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run the rows as one step; repeat it if a strategy fails, without its rows if it has failed twice."""
    failed_before: set[str] = set()
    while scheduled:
        parts = make_step_parts(scheduled)  # first: the forward pass evicts them from the processor's caches
        try:
            output = runner.execute(scheduled)
        except StrategyError as error:
            log.exception(
                "step failed; %s", "giving up its rows" if error.instance in failed_before else "repeating it"
            )
            yield StrategyFailed(error.instance)
            if error.instance in failed_before:
                gone = [s.request for s in scheduled if s.request.cache.name == error.instance]
                yield RequestsFailed(gone, f"{error}; other strategies go on", "strategy_failed")
                scheduled = [s for s in scheduled if s.request.cache.name != error.instance]
            failed_before.add(error.instance)
        else:
            yield RowsComputed(parts, output)
            return


def _run_one_by_one(runner: ModelRunner, model: Model, scheduled: Sequence[Scheduled]) -> Iterator[RowsResult]:
    """Run each row as a step of its own; requests whose rows fail again end with an error.

    A row is left to the next step if its seat has changed because a request before it failed: they shared work.
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
            log.exception("a request's row failed by itself, too; the request ends, and others go on")
            errors.append(error)
            yield RequestsFailed([row.request], STEP_FAILED.format(type(error).__name__), "step_failed")
        else:
            all_failed = False
    if errors and all_failed:
        _check_model(model, errors[-1])


def _check_model(model: Model, error: Exception) -> None:
    """Raise `error` if the model fails without any request, too: then only a new engine can help."""
    try:
        run_dummy_step(model, num_tokens=1, num_logits=1)
    except Exception:
        log.critical("the model cannot compute any more")
        raise error from None


def _get_seat(scheduled: Scheduled) -> Seat:
    seat = scheduled.request.seat
    assert seat is not None
    return seat
