"""What a fault excuses, and what is counted as wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.torture.answers import Answer
from tools.torture.checker import Checker, Injection
from tools.torture.exchange import (
    CONNECTION_CUT,
    ENGINE_UNAVAILABLE,
    INTERNAL,
    NO_ANSWER,
    REFUSED,
    STOPPING,
    Failure,
    Outcome,
)
from tools.torture.faults import FAULTS
from tools.torture.requests import COMPLETIONS, RequestSpec

DRAIN = 30.0
SPEC, OTHER = (RequestSpec(name, COMPLETIONS, "exact", {"prompt": "x"}) for name in ("this", "other"))


def answer(text: str) -> Answer:
    return Answer({0: {"text": text, "finish_reason": "length"}})


def checker(*injections: Injection) -> Checker:
    subject = Checker(DRAIN)
    subject.expected_answers = {"this": answer("the one answer"), "other": answer("quite another answer")}
    subject.injections = list(injections)
    return subject


def injection(name: str, began: float = 10.0, ended: float | None = 20.0) -> Injection:
    fault = next(fault for fault in FAULTS if fault.name == name)
    return Injection(fault.name, fault.excuses, fault.orderly, began, ended)


def failed(kind: str, began: float, ended: float) -> Outcome:
    return Outcome(began, ended, failure=Failure(kind, "a sentence"))


@pytest.mark.parametrize(
    ("fault", "kind", "began", "ended", "excused"),
    [
        ("kill-worker", CONNECTION_CUT, 9.0, 10.1, True),
        ("kill-worker", CONNECTION_CUT, 19.0, 25.0, True),
        ("kill-worker", CONNECTION_CUT, 20.5, 21.0, False),  # all was well again
        ("kill-worker", CONNECTION_CUT, 8.0, 9.9, False),  # not injected yet
        ("kill-worker", REFUSED, 9.0, 10.1, False),  # the other worker listens
        ("kill-engine", ENGINE_UNAVAILABLE, 9.0, 10.1, True),
        ("kill-engine", CONNECTION_CUT, 9.0, 10.1, False),  # workers have a sentence for it
        ("kill-engine", INTERNAL, 9.0, 10.1, False),
        ("kill-engine", NO_ANSWER, 9.0, 100.0, False),
        ("stop-engine", ENGINE_UNAVAILABLE, 9.0, 10.1, False),
        ("terminate", CONNECTION_CUT, 9.0, 10.1, False),  # it ran already
        ("terminate", ENGINE_UNAVAILABLE, 9.0, 10.1, False),
        ("terminate", REFUSED, 11.0, 11.1, True),
        ("terminate", STOPPING, 9.0, 12.0, False),  # it had 28 seconds more
        ("terminate", STOPPING, 9.0, 10 + DRAIN, True),
        ("kill", CONNECTION_CUT, 9.0, 10.1, True),
    ],
)
def test_only_a_blow_that_may_cause_a_failure_excuses_it(
    fault: str, kind: str, began: float, ended: float, excused: bool
) -> None:
    subject = checker(injection(fault))
    subject.check(SPEC, failed(kind, began, ended))
    assert list(subject.tally.problems) == ([] if excused else [f"unexpected failures: {kind}"])
    assert subject.tally.counts[f"{fault}: {kind}"] == excused


def test_nothing_excuses_a_failure_of_an_undisturbed_server() -> None:
    subject = checker()
    for kind in (CONNECTION_CUT, REFUSED, STOPPING, ENGINE_UNAVAILABLE, NO_ANSWER, INTERNAL):
        subject.check(SPEC, failed(kind, 1.0, 2.0))
    assert subject.tally.problems.total() == 6


def test_wrong_answers_are_counted_and_those_of_others_named() -> None:
    subject = checker()
    subject.check(SPEC, Outcome(1.0, 2.0, answer("the one answer")))
    subject.check(SPEC, Outcome(1.0, 2.0, answer("something else")))
    subject.check(SPEC, Outcome(1.0, 2.0, answer("quite another answer")))
    assert subject.tally.problems == {"wrong answers": 1, "answers of other requests": 1}
    assert "other" in subject.tally.examples["answers of other requests"][0]


def test_what_a_failed_or_left_stream_had_begun_is_compared_too() -> None:
    subject = checker(injection("kill-worker"))
    begun = replace(failed(CONNECTION_CUT, 9.0, 10.1), answer=Answer({0: {"text": "the on"}}))
    subject.check(SPEC, begun)
    assert not subject.tally.problems
    begun.answer = Answer({0: {"text": "another"}})
    subject.check(SPEC, begun)
    subject.check(SPEC, Outcome(1.0, 2.0, Answer({0: {"text": "X"}}), client_left=True))
    assert subject.tally.problems == {"wrong answers": 2}
