"""Checks the outcome of each request: an answer must be as expected, and a failure must be explained by a fault.

Knows answers, failures and the times of faults; neither HTTP nor processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from tools.torture.answers import Answer, find_difference, find_partial_difference, find_shape_difference
from tools.torture.exchange import CONNECTION_CUT, ENGINE_UNAVAILABLE, NO_ANSWER, REFUSED, STOPPING, Failure, Outcome
from tools.torture.requests import RequestSpec
from tools.torture.tally import Tally

ORDERLY_MARGIN = 0.5  # seconds before an orderly stop: later requests may not have reached the server in time
ALWAYS_EXCUSED = frozenset({"queue_full"})  # clients retry when the queue is full


@dataclass
class Injection:
    """One injection of a fault, from its signal until the server has recovered. Times are monotonic seconds."""

    name: str
    excuses: frozenset[str]  # kinds of failures that it may cause
    orderly: bool  # whether running requests must still be answered
    began: float = field(default_factory=monotonic)
    ended: float | None = None

    def can_excuse(self, outcome: Outcome, failure: Failure, drain_seconds: float) -> bool:
        """Return whether this fault may be the cause of a failure."""
        if outcome.ended < self.began or (self.ended is not None and outcome.began > self.ended):
            return False
        if failure.kind not in self.excuses:
            return False
        if failure.kind == STOPPING:
            return outcome.ended - self.began >= drain_seconds - 1
        return not self.orderly or outcome.began > self.began - ORDERLY_MARGIN


class Checker:
    """Compares outcomes with the expected answers, and counts results and problems in a tally."""

    def __init__(self, tally: Tally, drain_seconds: float, *, exact: bool) -> None:
        self.tally = tally
        self.expected_answers: dict[str, Answer] = {}  # by the name of a request
        self.injections: list[Injection] = []
        self.exact = exact  # whether answers must be equal bit for bit
        self._drain_seconds = drain_seconds

    # ------------------------------------------------------------ generation requests
    def check(self, spec: RequestSpec, outcome: Outcome) -> None:
        """Count the outcome of a generation request, and a problem if it is wrong."""
        self.tally.count("requests sent")
        if outcome.failure is not None:
            self.record_failure(outcome, outcome.failure, f"{spec.name} ({spec.path})")
        if outcome.failure is None and not outcome.client_left:
            self.tally.count("answers checked")
            self._compare_answer(spec, outcome.answer, find_difference if self.exact else find_shape_difference)
        elif outcome.answer.choices:
            self.tally.count("beginnings checked")
            if self.exact:
                self._compare_answer(spec, outcome.answer, find_partial_difference)
        if outcome.client_left:
            self.tally.count("clients that hung up")

    def _compare_answer(
        self, spec: RequestSpec, answer: Answer, differ: Callable[[Answer, Answer], str | None]
    ) -> None:
        wrong = differ(self.expected_answers[spec.name], answer)
        if wrong is None:
            return
        owner = self._find_owner(answer)
        name = "wrong answers" if owner is None else "answers of other requests"
        self.tally.add_problem(name, f"{spec.name}{f' got the answer of {owner}' if owner else ''}: {wrong}")

    def _find_owner(self, answer: Answer) -> str | None:
        """Return the name of the request that expects this answer; None if there is none, or for short texts."""
        texts = {index: choice["text"] for index, choice in answer.choices.items()}
        if not any(len(text) >= 8 for text in texts.values()):
            return None
        for name, known in self.expected_answers.items():
            if {index: choice["text"] for index, choice in known.choices.items()} == texts:
                return name
        return None

    # ------------------------------------------------------------ failures
    def record_failure(self, outcome: Outcome, failure: Failure, what: str) -> None:
        """Count a failure: by kind if it is always excused or a fault explains it, otherwise as a problem.

        `what` names the request in the problem's message.
        """
        injection = self._find_excuse(outcome, failure)
        if failure.kind in ALWAYS_EXCUSED:
            self.tally.count(f"refused: {failure.kind}")
        elif injection is not None:
            self.tally.count(f"{injection.name}: {failure.kind}")
        else:
            self.tally.add_problem(
                self._name_problem(outcome, failure), f"{what}{self._format_injections(outcome)}: {failure}"
            )

    def _find_excuse(self, outcome: Outcome, failure: Failure) -> Injection | None:
        for injection in reversed(self.injections):
            if injection.can_excuse(outcome, failure, self._drain_seconds):
                return injection
        return None

    def _name_problem(self, outcome: Outcome, failure: Failure) -> str:
        if failure.kind == NO_ANSWER:
            return "requests without answer or error"
        if failure.kind in (CONNECTION_CUT, REFUSED, STOPPING, ENGINE_UNAVAILABLE) and any(
            s.orderly for s in self._find_injections(outcome)
        ):
            return "requests lost while the server drained"
        return f"unexpected failures: {failure.kind}"

    def _find_injections(self, outcome: Outcome) -> list[Injection]:
        return [
            injection
            for injection in self.injections
            if outcome.ended >= injection.began and (injection.ended is None or outcome.began <= injection.ended)
        ]

    def _format_injections(self, outcome: Outcome) -> str:
        """Return a request's duration and the faults meanwhile as text, for a message."""
        found = [
            f"{each.name} {each.began - outcome.began:+.2f} s after it was sent"
            for each in self._find_injections(outcome)
        ]
        seconds = f" ended after {outcome.ended - outcome.began:.2f} s"
        return seconds + (f" (during {', '.join(found)})" if found else " (during no fault)")
