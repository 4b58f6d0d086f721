"""What an optional feature of the engine is: a `StepExtension`. The core knows the features only by its hooks.

The core calls the hooks of all extensions in a fixed order, in the engine's thread. Extensions with their own state are
grammars that compile, shadows, fallbacks and roll-outs. Knows no feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from server.engine.ipc.messages import Submit
from server.engine.model_runner import StepOutput
from server.engine.results import Event
from server.engine.sampling.sampler import SamplerInput
from server.engine.scheduling.request import Request
from server.engine.scheduling.step import RequestFailure, Scheduled
from server.records import Outcome, RequestRecord, StepReport


class StepExtension:
    """Base class of the optional features. A hook that a class does not override is never called, and costs nothing."""

    # ---------------------------------------------------------------- messages
    def hold(self, worker: int, message: Submit) -> bool:
        """Return whether to keep back a message of API worker `worker`; `begin` returns it when it may be queued.

        Raises RequestError to refuse it.
        """
        return False

    def withdraw(self, worker: int, request_id: str | None) -> bool:
        """Forget a message that was kept back, or all of a worker (None); return whether there was one."""
        return False

    def is_busy(self) -> bool:
        """Return whether there is work for the next step although no request is queued or runs."""
        return False

    # ---------------------------------------------------------------- a step
    def begin(self) -> Iterable[tuple[int, Submit]]:
        """Return the messages, each with its API worker, that were kept back and may be queued now."""
        return ()

    def queued(self, request: Request) -> None:
        """Note that a new request was queued."""

    def add_rows(self, rows: Sequence[Scheduled]) -> Iterable[Scheduled]:
        """Return further rows of a step, given those of its requests; they take what these have left."""
        return ()

    # The next three are called for each group of rows that was computed together: in a step that has to be repeated,
    # there are several.
    def committed(self, output: StepOutput) -> StepOutput:
        """Return the output that goes on, after it was committed and before anything of it is sent.

        An extension takes out its own rows, and requests that it moves; it may add to `failed`.
        """
        return output

    def forked(self, children: Sequence[Request]) -> None:
        """Note choices (n > 1) that have taken over a computed prompt, before their first token."""

    def appended(self, sampled: Sequence[SamplerInput], output: StepOutput) -> None:
        """Note that the tokens of `sampled` are in their requests, none of which has ended yet."""

    # ---------------------------------------------------------------- whenever it happens
    def rescue(self, failure: RequestFailure) -> bool:
        """Return whether a request that fails is taken over, so that its client gets no error. The first one wins."""
        return False

    def quarantined(self, instances: Collection[str]) -> None:
        """Note instances that are put in quarantine, before their requests end and their memory is freed."""

    def ended(self, request: Request, outcome: Outcome) -> Mapping[str, Any]:
        """Return fields for the `RequestRecord` of a request that ends; its seat is still open."""
        return {}

    def report(self, report: StepReport, finished: Sequence[RequestRecord]) -> Iterable[Event]:
        """Add to the report of a step, in which the requests `finished` have ended; return further events."""
        return ()


class Hooks:
    """For each hook the extensions that override it, in their order."""

    def __init__(self, extensions: Sequence[StepExtension]) -> None:
        def overriding(hook: str) -> Sequence[StepExtension]:
            base = getattr(StepExtension, hook)
            return [each for each in extensions if getattr(type(each), hook) is not base]

        self.hold = overriding("hold")
        self.withdraw = overriding("withdraw")
        self.is_busy = overriding("is_busy")
        self.begin = overriding("begin")
        self.queued = overriding("queued")
        self.add_rows = overriding("add_rows")
        self.committed = overriding("committed")
        self.forked = overriding("forked")
        self.appended = overriding("appended")
        self.rescue = overriding("rescue")
        self.quarantined = overriding("quarantined")
        self.ended = overriding("ended")
        self.report = overriding("report")
