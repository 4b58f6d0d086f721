"""Checks the outcome of each request: an answer must be as expected, and a failure must be explained by a fault.

Knows answers, failures and the times of faults; neither HTTP nor processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from tools.torture.answers import Answer, find_difference, find_partial_difference
from tools.torture.exchange import STOPPING, Failure, Outcome
from tools.torture.requests import RequestSpec

ORDERLY_MARGIN = 0.5  # seconds before an orderly stop: later requests may not have reached the server in time
ALWAYS_EXCUSED = frozenset({"queue_full"})  # clients retry when the queue is full
MAX_EXAMPLES = 5  # examples that are kept of each problem
MAX_EXAMPLE_CHARS = 4000


class Tally:
    """The counts of one run. A problem is something that must not happen; everything else is a plain count."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    def add_problem(self, name: str, example: str) -> None:
        """Count a problem and keep its example if there are few of its kind."""
        self.problems[name] += 1
        if len(self.examples[name]) < MAX_EXAMPLES:
            self.examples[name].append(example[:MAX_EXAMPLE_CHARS])


@dataclass
class Injection:
    """One injection of a fault, from its signal until the server has recovered. Times are monotonic seconds."""

    name: str
    excuses: frozenset[str]  # kinds of failures that it may cause
    orderly: bool  # whether running requests must still be answered
    began: float = field(default_factory=monotonic)
    ended: float | None = None

    def overlaps(self, outcome: Outcome) -> bool:
        return outcome.ended >= self.began and (self.ended is None or outcome.began <= self.ended)

    def can_excuse(self, outcome: Outcome, failure: Failure, drain_seconds: float) -> bool:
        """Return whether this fault may be the cause of a failure."""
        if not self.overlaps(outcome) or failure.kind not in self.excuses:
            return False
        if failure.kind == STOPPING:
            return outcome.ended - self.began >= drain_seconds - 1
        return not self.orderly or outcome.began > self.began - ORDERLY_MARGIN


class Checker:
    """Compares outcomes with the expected answers, and counts results and problems in a tally."""

    def __init__(self, drain_seconds: float) -> None:
        self.tally = Tally()
        self.expected_answers: dict[str, Answer] = {}  # by the name of a request
        self.injections: list[Injection] = []
        self._drain_seconds = drain_seconds

    # ------------------------------------------------------------ generation requests
    def check(self, spec: RequestSpec, outcome: Outcome) -> None:
        """Count the outcome of a generation request, and a problem if it is wrong."""
        self.tally.counts["requests sent"] += 1
        if outcome.failure is not None:
            self.record_failure(outcome, outcome.failure, f"{spec.name} ({spec.path})")
        if outcome.failure is None and not outcome.client_left:
            self.tally.counts["answers checked"] += 1
            self._compare_answer(spec, outcome.answer, find_difference)
        elif outcome.answer.choices:
            self.tally.counts["beginnings checked"] += 1
            self._compare_answer(spec, outcome.answer, find_partial_difference)
        self.tally.counts["clients that hung up"] += outcome.client_left

    def _compare_answer(
        self, spec: RequestSpec, answer: Answer, differ: Callable[[Answer, Answer], str | None]
    ) -> None:
        if (wrong := differ(self.expected_answers[spec.name], answer)) is None:
            return
        if (owner := self._find_owner(answer)) is None:
            self.tally.add_problem("wrong answers", f"{spec.name}: {wrong}")
        else:
            self.tally.add_problem("answers of other requests", f"{spec.name} got the answer of {owner}: {wrong}")

    def _find_owner(self, answer: Answer) -> str | None:
        """Return the name of the request that expects this answer; None if there is none, or for short texts."""
        texts = _get_texts(answer)
        if not any(len(text) >= 8 for text in texts.values()):
            return None
        return next((name for name, known in self.expected_answers.items() if _get_texts(known) == texts), None)

    # ------------------------------------------------------------ failures
    def record_failure(self, outcome: Outcome, failure: Failure, what: str) -> None:
        """Count a failure: by kind if it is always excused or a fault explains it, otherwise as a problem.

        `what` names the request in the problem's message.
        """
        excuses = (each for each in self.injections if each.can_excuse(outcome, failure, self._drain_seconds))
        if failure.kind in ALWAYS_EXCUSED:
            self.tally.counts[f"refused: {failure.kind}"] += 1
        elif (injection := max(excuses, key=lambda each: each.began, default=None)) is not None:
            self.tally.counts[f"{injection.name}: {failure.kind}"] += 1
        else:
            meanwhile = [each for each in self.injections if each.overlaps(outcome)]
            faults = [f"{each.name} {each.began - outcome.began:+.2f} s after it was sent" for each in meanwhile]
            during = f"ended after {outcome.ended - outcome.began:.2f} s (during {', '.join(faults) or 'no fault'})"
            self.tally.add_problem(f"unexpected failures: {failure.kind}", f"{what} {during}: {failure}")


def _get_texts(answer: Answer) -> dict[int, str]:
    return {index: choice["text"] for index, choice in answer.choices.items()}
