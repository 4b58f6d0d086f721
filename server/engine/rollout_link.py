"""The engine's link to the controller of roll-outs, a process of its own (server/rollouts).

The controller says how requests are divided, which `Selector` does from then on, also while no controller is connected;
it is sent the requests that have ended, and the API workers' queries about roll-outs. Knows no stage and no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from server.engine.extension import StepExtension
from server.engine.ipc.messages import (
    Answer,
    RolloutAnswer,
    RolloutQuery,
    RolloutQuestion,
    RolloutSamples,
    SetSplits,
)
from server.engine.results import Event
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector
from server.records import REPORT_CONFIDENCE, RequestRecord, StepReport

NOTHING: dict[RolloutQuery, dict[str, Any]] = {  # the answers of a server without a controller
    "rollouts": {"object": "list", "data": []},
    "fidelity": {"object": "list", "confidence": REPORT_CONFIDENCE, "data": []},
}


def refuse_to_start() -> None:
    """Raise RequestError: this engine has no supervisor that could start a controller."""
    raise RequestError(503, "roll-outs need a server: start one by `kvmux serve`")


class RolloutLink(StepExtension):
    """Divides requests as the controller says, and reports to it; `is_usable`: whether an instance gets requests."""

    def __init__(self, selector: Selector, is_usable: Callable[[str], bool]) -> None:
        self.states: Mapping[str, tuple[str, float]] = {}  # as in SetSplits
        self.pairs: Sequence[tuple[str, str]] = ()
        self.controller: int | None = None  # the number of its connection
        self.is_expected = False  # whether there is a controller, which connects soon if it is not connected
        self.start_controller: Callable[[], None] = refuse_to_start
        self._selector = selector
        self._is_usable = is_usable
        self._rolled_back: list[str] = []  # since the last report
        self._unusable: list[str] = []
        self._waiting: list[RolloutQuestion] = []  # until the controller is connected

    # ---------------------------------------------------------------- the controller's messages
    def set_splits(self, controller: int, message: SetSplits) -> list[Event]:
        """Divide requests in another way from now on; return what the controller has to know."""
        self.controller, self.is_expected = controller, True
        self._selector.splits = {split.served: split for split in message.splits}
        self.states, self.pairs = message.states, message.pairs
        self._rolled_back += message.rolled_back
        candidates = [split.candidate for split in message.splits if not split.is_complete]
        unusable = [name for name in candidates if not self._is_usable(name)]
        questions, self._waiting = self._waiting, []
        events = [Event(controller, question) for question in questions]
        return [Event(controller, RolloutSamples(unusable=unusable)), *events] if unusable else events

    def forget(self, worker: int) -> None:
        """Note that a connection has ended. Without a controller, requests are divided as it said last."""
        if worker == self.controller:
            self.controller = None
        self._waiting = [question for question in self._waiting if question.worker != worker]

    # ---------------------------------------------------------------- API workers' queries
    def ask(self, worker: int, query_id: int, query: RolloutQuery) -> Event | None:
        """Return what is sent now: the query to the controller, or an answer. None: once the controller is connected.

        The controller is started for the first command. Raises RequestError if it cannot be.
        """
        question = RolloutQuestion(worker, query_id, query)
        if self.controller is not None:
            return Event(self.controller, question)
        if not self.is_expected:
            if isinstance(query, str):
                return Event(worker, Answer(query_id, msgspec.json.encode(NOTHING[query]), created_at=monotonic()))
            self.start_controller()
            self.is_expected = True
        self._waiting.append(question)
        return None

    def answer(self, message: RolloutAnswer) -> Event:
        return Event(message.worker, message.answer)

    # ---------------------------------------------------------------- a step
    def quarantined(self, instances: Collection[str]) -> None:
        self._unusable += instances

    def report(self, report: StepReport, finished: Sequence[RequestRecord]) -> Sequence[Event]:
        """Send the controller what has ended in a step; tell metrics which roll-outs were rolled back."""
        report.rollbacks, self._rolled_back = self._rolled_back, []
        records = [each for each in finished if each.rollout is not None and each.conversation is not None]
        unusable, self._unusable = self._unusable, []
        if self.controller is None or not (records or report.shadows or unusable):
            return ()
        return (Event(self.controller, RolloutSamples(records, list(report.shadows), unusable)),)
