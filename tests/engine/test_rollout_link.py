"""The engine's end of the link to the controller of roll-outs: what it asks, tells and keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.engine.ipc.messages import (
    Answer,
    ControlRollout,
    RolloutAnswer,
    RolloutQuestion,
    RolloutSamples,
    SetSplits,
    Split,
    StartRollout,
)
from server.engine.results import Event
from server.engine.rollout_link import RolloutLink
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector
from tests.metrics.fake_metrics import fake_step
from tests.rollouts.rollout_driver import make_fidelity, make_record

CONTROLLER, WORKER = 7, 3
SPLIT = Split("r", "paged", "small", 0.5, 0.1)
START = StartRollout("r", {"from": "paged", "to": "small"}, "key 1")


@pytest.fixture
def selector() -> Selector:
    return Selector(["paged", "small"], [], "paged")


@pytest.fixture
def link(selector: Selector) -> RolloutLink:
    return RolloutLink(selector, lambda _: True)


def report(link: RolloutLink, *records: Any, shadows: Any = ()) -> tuple[list[Event], list[str]]:
    """Report a step in which requests have ended; return what is sent, and the roll-backs for metrics."""
    step = fake_step(shadows=shadows)
    events = list(link.report(step, records))
    return events, list(step.rollbacks)


def test_without_a_controller_there_are_no_roll_outs(link: RolloutLink) -> None:
    for question, expected in (("rollouts", []), ("fidelity", [])):
        event = link.ask(WORKER, 5, question)  # type: ignore[arg-type]
        assert event is not None
        assert isinstance(event.message, Answer)
        assert (event.worker, event.message.query_id) == (WORKER, 5)
        assert msgspec.json.decode(event.message.body)["data"] == expected


def test_the_first_command_starts_the_controller_which_then_answers(link: RolloutLink) -> None:
    started = []
    link.start_controller = lambda: started.append(1)
    assert link.ask(WORKER, 1, START) is None
    assert link.ask(WORKER, 2, "rollouts") is None, "it is to come"
    assert started == [1]
    events = link.set_splits(CONTROLLER, SetSplits([]))
    assert events == [
        (CONTROLLER, RolloutQuestion(WORKER, 1, START)),
        (CONTROLLER, RolloutQuestion(WORKER, 2, "rollouts")),
    ]
    pause = ControlRollout("r", "pause", "key 1")
    assert link.ask(WORKER, 3, pause) == (CONTROLLER, RolloutQuestion(WORKER, 3, pause))
    answer = Answer(3, b"{}")
    assert link.answer(RolloutAnswer(WORKER, answer)) == (WORKER, answer)


def test_an_engine_without_a_supervisor_starts_no_controller(link: RolloutLink) -> None:
    with pytest.raises(RequestError, match="kvmux serve"):
        link.ask(WORKER, 1, START)


def test_questions_of_a_worker_that_is_gone_are_forgotten(link: RolloutLink) -> None:
    link.is_expected = True
    link.ask(WORKER, 1, "rollouts")
    link.ask(WORKER + 1, 1, "rollouts")
    link.forget(WORKER)
    assert link.set_splits(CONTROLLER, SetSplits([])) == [(CONTROLLER, RolloutQuestion(WORKER + 1, 1, "rollouts"))]


def test_requests_are_divided_as_before_while_the_controller_is_away(link: RolloutLink, selector: Selector) -> None:
    link.set_splits(CONTROLLER, SetSplits([SPLIT]))
    link.forget(CONTROLLER)
    assert selector.splits == {"paged": SPLIT}
    assert report(link, make_record("paged", rollout="r"))[0] == [], "there is nobody to tell"
    link.set_splits(CONTROLLER + 1, SetSplits([]))
    assert selector.splits == {}


def test_it_is_told_of_counted_requests_comparisons_and_quarantines(link: RolloutLink) -> None:
    link.set_splits(CONTROLLER, SetSplits([SPLIT]))
    counted, others = (
        make_record("paged", rollout="r"),
        [
            make_record("paged", rollout=None),
            make_record("paged", rollout="r", conversation=None),
        ],
    )
    link.quarantined(["small"])
    fidelity = make_fidelity([0.1])
    assert report(link, counted, *others, shadows=[fidelity])[0] == [
        (CONTROLLER, RolloutSamples([counted], [fidelity], ["small"]))
    ]
    assert report(link)[0] == []


def test_it_is_told_of_candidates_that_got_no_requests_already(selector: Selector) -> None:
    link = RolloutLink(selector, lambda name: name != "small")
    assert link.set_splits(CONTROLLER, SetSplits([SPLIT])) == [(CONTROLLER, RolloutSamples(unusable=["small"]))]
    complete = msgspec.structs.replace(SPLIT, is_complete=True)
    assert link.set_splits(CONTROLLER, SetSplits([complete])) == [], "which has no guard any more"


def test_roll_backs_are_counted_once(link: RolloutLink) -> None:
    link.set_splits(CONTROLLER, SetSplits([], rolled_back=["a"]))
    link.set_splits(CONTROLLER, SetSplits([], rolled_back=["b"]))
    assert report(link)[1] == ["a", "b"]
    assert report(link)[1] == []
