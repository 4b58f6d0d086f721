"""The results of a step of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.engine.ipc.messages import FromEngine, Progress
from server.engine.scheduling.request import Request
from server.records import RequestRecord, StepReport


class Event(NamedTuple):
    """A message, and the number of the API worker's connection on which it is sent."""

    worker: int
    message: FromEngine


def report_progress(request: Request) -> list[Event]:
    """Return the event that tells how much of a request's prompt is computed; none once it has an output."""
    if request.num_output_tokens or request.sequence is None:
        return []
    worker, request_id = request.key
    return [Event(worker, Progress(request_id, min(request.num_computed_tokens, request.num_prompt_tokens)))]


class StepResult(NamedTuple):
    """The results of one step: messages for clients, its metrics, and the records of requests that have ended."""

    events: Sequence[Event]
    report: StepReport
    finished: Sequence[RequestRecord]
