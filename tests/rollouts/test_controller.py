"""The controller of roll-outs: what it makes of the engine's messages, and when it says how to divide requests."""

from __future__ import annotations

import random

import msgspec
import pytest

from server.engine.ipc.messages import (
    ControlRollout,
    Hello,
    RolloutAnswer,
    RolloutQuestion,
    RolloutSamples,
    SetSplits,
    Split,
    StartRollout,
)
from server.rollouts.process import Controller, ServingClock
from tests.rollouts.rollout_driver import Clock, RolloutDriver, make_fidelity
from tests.rollouts.test_rollouts import ROLLOUT

HELLO = Hello("tiny", [], 100, 10, [])


@pytest.fixture
def driver(rng: random.Random) -> RolloutDriver:
    return RolloutDriver(rng, {"r": ROLLOUT})


@pytest.fixture
def controller(driver: RolloutDriver) -> Controller:
    return Controller(driver.rollouts, ServingClock(driver.clock))


def test_every_engine_is_told_at_once_and_again_only_of_changes(controller: Controller) -> None:
    assert controller.update() == [], "there is no engine yet"
    for _ in range(2):
        (told,) = controller.handle(HELLO)
        assert told == SetSplits([Split("r", "paged", "small", 0.0, 0.5)], {"r": ("shadow", 0.0)}, [("paged", "small")])
        assert controller.update() == []
        controller.disconnect()


def test_what_a_command_changes_holds_before_it_is_answered(controller: Controller) -> None:
    controller.handle(HELLO)
    splits, answer = controller.handle(RolloutQuestion(3, 9, ControlRollout("r", "advance", "key 1")))
    assert isinstance(splits, SetSplits)
    assert [each.share for each in splits.splits] == [0.1]
    assert isinstance(answer, RolloutAnswer)
    assert (answer.worker, answer.answer.query_id, answer.answer.error) == (3, 9, None)
    assert msgspec.json.decode(answer.answer.body)["state"] == "canary"


def test_a_command_that_cannot_be_followed_is_refused(controller: Controller) -> None:
    controller.handle(HELLO)
    (answer,) = controller.handle(RolloutQuestion(3, 9, StartRollout("r", ROLLOUT, "key 1")))
    assert isinstance(answer, RolloutAnswer)
    assert answer.answer.error is not None
    assert (answer.answer.error.status, answer.answer.error.code) == (409, "rollout_exists")


@pytest.mark.parametrize("question", ["rollouts", "fidelity"])
def test_questions_are_answered(controller: Controller, driver: RolloutDriver, question: str) -> None:
    controller.handle(HELLO)
    controller.handle(RolloutSamples(fidelities=[make_fidelity([0.1, 0.2])]))
    (answer,) = controller.handle(RolloutQuestion(3, 9, question))  # type: ignore[arg-type]
    assert isinstance(answer, RolloutAnswer)
    expected = driver.rollouts.describe() if question == "rollouts" else driver.rollouts.describe_fidelity()
    assert msgspec.json.decode(answer.answer.body) == msgspec.json.decode(msgspec.json.encode(expected))


def test_a_roll_back_while_the_engine_is_away_is_told_to_the_next_one(
    controller: Controller, driver: RolloutDriver
) -> None:
    controller.handle(HELLO)
    controller.disconnect()
    driver.serve(200, kl=2.0, agreed=0.1)
    assert controller.update() == []
    (told,) = controller.handle(HELLO)
    assert told == SetSplits([], {"r": ("rolled_back", 0.0)}, [("paged", "small")], ["r"])
    assert controller.update() == []


def test_candidates_without_requests_are_rolled_back(controller: Controller) -> None:
    controller.handle(HELLO)
    (told,) = controller.handle(RolloutSamples(unusable=["small"]))
    assert isinstance(told, SetSplits)
    assert (told.splits, told.rolled_back) == ([], ["r"])


def test_a_stage_does_not_pass_while_there_is_no_engine(rng: random.Random) -> None:
    clock = Clock()
    serving = ServingClock(clock)
    driver = RolloutDriver(rng, {"r": ROLLOUT}, clock=serving)
    controller = Controller(driver.rollouts, serving)
    controller.handle(HELLO)
    driver.serve(100)
    clock.now += 59
    controller.disconnect()
    clock.now += 10_000
    assert controller.update() == []
    assert driver.show()["elapsed_seconds"] == 59
    controller.handle(HELLO)
    assert driver.show()["state"] == "shadow"
    clock.now += 1
    (told,) = controller.update()
    assert isinstance(told, SetSplits)
    assert driver.show()["state"] == "canary"
