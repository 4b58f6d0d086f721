"""The results of a step of the engine: data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.engine.ipc.messages import FromEngine
from server.records import RequestRecord, StepReport


class Event(NamedTuple):
    """A message, and the number of the API worker's connection on which it is sent."""

    worker: int
    message: FromEngine


class StepResult(NamedTuple):
    """The results of one step: messages for clients, its metrics, and the records of requests that have ended."""

    events: Sequence[Event]
    report: StepReport
    finished: Sequence[RequestRecord]
