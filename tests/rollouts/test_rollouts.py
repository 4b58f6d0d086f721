"""Roll-outs: which requests go where, when stages advance, when a candidate is rolled back, what operators can do."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.engine.ipc.messages import BoardBounds
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import compute_position
from tests.rollouts.rollout_driver import BAD_KL, RolloutDriver, make_fidelity, make_record

ROLLOUT: dict[str, Any] = {
    "from": "paged",
    "to": "small",
    "shadow": "50%",
    "canary": ["10%", "50%", "100%"],
    "hold": 60,
    "guard": {"min_requests": 20},
}
STAGES = ["shadow", "canary 10%", "canary 50%", "canary 100%", "complete"]


@pytest.fixture
def driver(rng: random.Random) -> RolloutDriver:
    return RolloutDriver(rng, {"r": ROLLOUT})


def labels(driver: RolloutDriver, name: str = "r") -> list[str]:
    """Return the states that a roll-out has been in."""
    return [change["to"].partition(" (")[0] for change in driver.show(name)["history"]]


def advance_to(driver: RolloutDriver, stage: int) -> None:
    """Advance to "shadow" (0), a stage of the canary (1 to 3), or "complete" (4)."""
    for _ in range(stage):
        driver.rollouts.control("r", "advance", "key 1")


# ---------------------------------------------------------------- which requests go where
def test_without_roll_outs_every_request_stays(rng: random.Random) -> None:
    assert RolloutDriver(rng).choose()[:4] == ("paged", "default", None, None)


def test_first_a_share_of_the_requests_is_shadowed_and_none_is_served(driver: RolloutDriver) -> None:
    choices = [driver.choose() for _ in range(1000)]
    assert {each.instance for each in choices} == {"paged"}
    assert {each.reason for each in choices} == {"default"}
    assert {each.rollout for each in choices} == {"r"}
    assert 400 < sum(each.shadow == "small" for each in choices) < 600


def test_a_conversation_stays_with_the_candidate_while_the_share_grows(driver: RolloutDriver) -> None:
    users = [f"user {i}" for i in range(1000)]
    under_candidate: set[str] = set()
    for stage, share in ((1, 100), (2, 500), (3, 1000)):
        driver.rollouts.control("r", "advance", "key 1")
        now = {user for user in users if driver.choose(user).instance == "small"}
        assert now == {user for user in users if driver.choose(user).instance == "small"}, "each time the same"
        assert under_candidate <= now
        assert len(now) == pytest.approx(share, abs=60), stage
        under_candidate = now
    assert driver.choose("anyone").reason == "rollout r: canary"


def test_the_conversations_of_two_roll_outs_are_independent() -> None:
    both = sum(
        compute_position("canary", "a", str(i)) < 0.5 > compute_position("canary", "b", str(i)) for i in range(4000)
    )
    assert both == pytest.approx(1000, abs=130)


@pytest.mark.parametrize("place", ["request", "header", "model"])
def test_a_request_that_names_its_instance_keeps_it(driver: RolloutDriver, place: str) -> None:
    advance_to(driver, 4)
    assert driver.choose(kv_cache="paged", named_by=place)[:2] == ("paged", place)
    assert driver.choose()[:2] == ("small", "rollout r: complete")


def test_a_request_can_opt_out(driver: RolloutDriver) -> None:
    advance_to(driver, 3)
    assert {driver.choose(rollouts=False)[:4] for _ in range(50)} == {("paged", "default", None, None)}


def test_requests_of_a_rule_are_shadowed_without_a_roll_out(rng: random.Random) -> None:
    rules = [{"use": "paged", "shadow": "window", "min_prompt_tokens": 5}, {"use": "paged"}]
    driver = RolloutDriver(rng, rules=rules)
    assert driver.choose(prompt_tokens=5)[:3] == ("paged", "rule 0", "window")
    assert driver.choose(prompt_tokens=4)[:3] == ("paged", "rule 1", None)
    assert driver.choose(prompt_tokens=5, rollouts=False).shadow is None


def test_no_request_goes_to_a_candidate_that_gets_none(driver: RolloutDriver) -> None:
    advance_to(driver, 3)
    assert driver.choose(usable=lambda name: name != "small")[:3] == ("paged", "default", None)
    driver.rollouts.roll_back_unusable(["small"])
    assert driver.show()["state"] == "rolled_back"
    assert "gets no requests after repeated faults" in driver.show()["reason"]


def test_a_complete_roll_out_waits_while_its_instance_gets_no_requests(driver: RolloutDriver) -> None:
    advance_to(driver, 4)
    assert driver.choose(usable=lambda name: name != "small")[:2] == ("paged", "default")
    assert driver.choose()[:2] == ("small", "rollout r: complete")


def test_roll_outs_can_follow_each_other(rng: random.Random) -> None:
    driver = RolloutDriver(rng, {"r": ROLLOUT, "next": ROLLOUT | {"from": "small", "to": "window"}})
    advance_to(driver, 4)
    for _ in range(3):
        driver.rollouts.control("next", "advance", "key 1")
    assert driver.choose()[:2] == ("window", "rollout next: canary")


# ---------------------------------------------------------------- stages
def test_a_good_candidate_passes_all_stages(driver: RolloutDriver) -> None:
    for _ in range(12):
        driver.serve(200)
        driver.wait(61)
    assert labels(driver) == STAGES
    assert driver.show()["share"] == 1.0


def test_a_stage_lasts_as_long_as_it_has_to_and_until_enough_requests_were_seen(driver: RolloutDriver) -> None:
    driver.serve(200)
    driver.wait(59)
    assert driver.show()["state"] == "shadow"
    driver.wait(2)
    assert driver.show()["stage"] == 1
    driver.wait(10_000)
    assert driver.show()["stage"] == 1, "without requests nothing is known"
    assert "of 20 requests have been seen" in driver.show()["verdict"]["reason"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_candidate_that_diverges_is_rolled_back(
    driver: RolloutDriver, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    advance_to(driver, stage)
    driver.serve(500, kl=BAD_KL, agreed=0.6)
    found = driver.show()
    assert found["state"] == "rolled_back"
    assert found["fidelity"]["requests"] <= 20
    assert "the mean KL divergence is" in found["reason"]
    assert "at most 0.05 is allowed" in found["reason"]
    assert f"roll-out r: {STAGES[stage]}" in caplog.text
    assert driver.rollouts.list_splits().states == {"r": ("rolled_back", 0.0)}
    assert driver.rollouts.list_splits().rolled_back == []
    assert driver.choose()[:3] == ("paged", "default", None)
    driver.wait(10_000)
    assert driver.show()["state"] == "rolled_back", "it does not begin again by itself"


def test_one_bad_request_rolls_nothing_back(driver: RolloutDriver) -> None:
    driver.serve(30)
    driver.observe([make_fidelity([5.0] * 20, agreed=0.0)], [])
    assert driver.show()["state"] == "shadow"


def test_an_impossible_token_does_not_count_as_zero(driver: RolloutDriver) -> None:
    for _ in range(20):
        driver.observe([make_fidelity([0.001] * 19 + [float("inf")])], [])
    assert driver.show()["state"] == "rolled_back"
    assert driver.show()["fidelity"]["infinite_kl_tokens"] > 0


def test_a_candidate_that_fails_is_rolled_back(driver: RolloutDriver) -> None:
    for _ in range(12):
        driver.observe([make_fidelity([], ended_early="failed")], [])
    assert driver.show()["state"] == "rolled_back"
    assert "comparisons in which the candidate failed" in driver.show()["reason"]


def test_comparisons_that_ended_for_lack_of_room_are_no_failures(driver: RolloutDriver) -> None:
    for _ in range(200):
        driver.observe([make_fidelity([], ended_early="room")], [])
    assert driver.show()["state"] == "shadow"
    assert driver.show()["fidelity"]["ended_early"]["room"] == 200


def test_errors_of_served_requests_roll_back_and_cancelled_ones_do_not(driver: RolloutDriver) -> None:
    advance_to(driver, 1)
    for _ in range(200):
        driver.observe([], [make_record("small", rollout="r", outcome="cancelled")])
    assert driver.show()["state"] == "canary"
    for _ in range(10):
        driver.observe([], [make_record("small", rollout="r", outcome="error")])
    assert driver.show()["state"] == "rolled_back"
    assert "the share of failed requests" in driver.show()["reason"]


def test_a_slow_candidate_is_rolled_back(driver: RolloutDriver) -> None:
    advance_to(driver, 2)
    for i in range(400):  # with fewer than a hundred of each, the 95th percentile has no upper bound
        slow, jitter = i % 2 == 0, driver.rng.uniform(0.8, 1.2)
        record = make_record(
            "small" if slow else "paged", rollout="r", first_token_seconds=jitter * (0.5 if slow else 0.1)
        )
        driver.observe([], [record])
        driver.wait(0.01)
    assert driver.show()["state"] == "rolled_back"
    assert "the time to the first token, relative to the baseline" in driver.show()["reason"]


def test_requests_that_name_their_instance_are_not_counted(driver: RolloutDriver) -> None:
    advance_to(driver, 1)
    for _ in range(20):
        driver.observe([], [make_record("small", rollout="r", outcome="error", conversation=None)])
    assert driver.show()["canary"]["requests"] == 0
    assert not driver.choose(kv_cache="paged").is_counted
    assert driver.choose().is_counted


def test_what_a_fallback_of_the_candidate_served_counts_as_its_failure(driver: RolloutDriver) -> None:
    advance_to(driver, 1)
    for _ in range(10):
        moved = make_record("paged", rollout="r", reason="fallback of small", fallback_of="small")
        driver.observe([], [moved])
    assert driver.show()["state"] == "rolled_back"
    assert driver.show()["canary"]["failed"] == driver.show()["canary"]["requests"] > 0
    assert driver.show()["baseline"]["requests"] == 0


def test_one_bad_request_or_conversation_does_not_roll_back(driver: RolloutDriver) -> None:
    advance_to(driver, 1)
    bad = {"outcome": "error", "conversation": "a prompt with eight choices"}
    driver.observe([], [make_record("small", rollout="r", **bad) for _ in range(8)])
    for _ in range(8):
        driver.observe([], [make_record("small", rollout="r")])
        assert driver.show()["state"] == "canary"
    for _ in range(5):
        driver.observe([], [make_record("small", rollout="r", outcome="error")])
    assert driver.show()["state"] == "rolled_back"


def test_errors_of_both_arms_are_not_the_candidates_fault(driver: RolloutDriver) -> None:
    advance_to(driver, 2)
    for _ in range(100):
        outcome = "error" if driver.rng.random() < 0.4 else "length"
        arms = [make_record(name, rollout="r", outcome=outcome) for name in ("paged", "small")]
        driver.observe([], arms)
    assert driver.show()["state"] == "canary"


def test_a_request_that_the_candidate_cannot_hold_stays(driver: RolloutDriver) -> None:
    advance_to(driver, 3)
    assert driver.choose()[:2] == ("small", "rollout r: canary")
    assert driver.choose(has_room=lambda name: name != "small")[:2] == ("paged", "default")
    driver.rollouts.control("r", "advance", "key 1")
    assert driver.choose()[:2] == ("small", "rollout r: complete")
    assert driver.choose(has_room=lambda name: name != "small")[:2] == ("paged", "default")


def test_a_candidate_in_quarantine_is_rolled_back_at_once(driver: RolloutDriver) -> None:
    driver.rollouts.roll_back_unusable(["window"])
    assert driver.show()["state"] == "shadow"
    driver.rollouts.roll_back_unusable(["small"])
    assert driver.show()["state"] == "rolled_back"
    assert "gets no requests after repeated faults" in driver.show()["reason"]


# ---------------------------------------------------------------- operators
def test_a_pause_keeps_the_stage_and_the_guard(driver: RolloutDriver) -> None:
    driver.rollouts.control("r", "pause", "key 1")
    driver.serve(100)
    driver.wait(1000)
    assert driver.show()["paused"]
    assert driver.rollouts.list_splits().states == {"r": ("paused", 0.0)}
    assert labels(driver)[-1] == "shadow, paused"
    driver.rollouts.control("r", "resume", "key 1")
    driver.wait(1)
    assert driver.show()["stage"] == 1
    driver.rollouts.control("r", "pause", "key 1")
    driver.serve(500, kl=BAD_KL, agreed=0.5)
    assert driver.show()["state"] == "rolled_back"


def test_what_an_operator_did_is_in_the_log_and_the_history(
    driver: RolloutDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        driver.rollouts.control("r", "advance", "key 1a2b")
        driver.rollouts.control("r", "abort", "key 3c4d")
    assert [change["by"] for change in driver.show()["history"]] == [None, "key 1a2b", "key 3c4d"]
    assert "(by key 3c4d)" in caplog.text
    assert driver.rollouts.list_splits().rolled_back == [], "an abort is no roll-back"
    assert driver.choose()[:4] == ("paged", "default", None, None)


@pytest.mark.parametrize("action", ["pause", "resume", "advance", "abort"])
def test_an_ended_roll_out_takes_no_command(driver: RolloutDriver, action: Any) -> None:
    driver.rollouts.control("r", "abort", "key 1")
    with pytest.raises(RequestError, match=r"is aborted, so .* has no effect: start it again") as caught:
        driver.rollouts.control("r", action, "key 1")
    assert (caught.value.status, caught.value.code) == (409, "rollout_ended")


def test_a_complete_roll_out_can_be_aborted(driver: RolloutDriver) -> None:
    advance_to(driver, 4)
    driver.rollouts.control("r", "abort", "key 1")
    assert driver.choose()[:2] == ("paged", "default")


def test_a_command_to_an_unknown_roll_out_is_refused(driver: RolloutDriver) -> None:
    with pytest.raises(RequestError, match="there is no roll-out 'x'; there are: r") as caught:
        driver.rollouts.control("x", "pause", "key 1")
    assert caught.value.status == 404


def test_an_operator_starts_a_roll_out(rng: random.Random) -> None:
    driver = RolloutDriver(rng)
    started = driver.rollouts.start("new", ROLLOUT, "key 1")
    assert (started["state"], started["settings"]["canary"]) == ("shadow", ["10%", "50%", "100%"])
    with pytest.raises(RequestError, match="roll-out 'new' is shadow: abort it first") as caught:
        driver.rollouts.start("new", ROLLOUT, "key 1")
    assert caught.value.status == 409
    driver.rollouts.control("new", "abort", "key 1")
    assert driver.rollouts.start("new", ROLLOUT | {"shadow": "0%"}, "key 1")["state"] == "canary"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to": "nothing"}, "there is no instance 'nothing'"),
        ({"to": "paged"}, "from and to are both 'paged'"),
        ({"canary": ["50%", "10%"]}, "the shares should rise"),
        ({"canary": []}, "1 to 100 shares"),
        ({"shadow": "101%"}, "between 0% and 100%"),
        ({"hold": -1}, "hold"),
        ({"guard": {"kl_mean": -1}}, "guard.kl_mean"),
        ({"guard": {"kl": 1}}, "guard.kl is not a key"),
        ({"speed": 1}, "speed is not a key of a roll-out"),
    ],
)
def test_wrong_settings_are_refused_with_the_key(rng: random.Random, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        RolloutDriver(rng).rollouts.start("new", ROLLOUT | change, "key 1")
    assert (caught.value.status, caught.value.param) == (400, "settings")


def test_roll_outs_that_hinder_each_other_are_refused(driver: RolloutDriver) -> None:
    for other in (ROLLOUT | {"to": "window"}, {"from": "small", "to": "paged"}):
        with pytest.raises(RequestError) as caught:
            driver.rollouts.start("other", other, "key 1")
        assert caught.value.status == 409
    assert driver.rollouts.start("other", ROLLOUT | {"from": "contiguous"}, "key 1")["state"] == "shadow"


def test_fidelity_is_known_for_each_pair(driver: RolloutDriver) -> None:
    driver.serve(60)
    driver.observe([make_fidelity([0.5, 0.7], candidate="window", agreed=0.5)], [])
    small, window = driver.rollouts.describe_fidelity()["data"]
    assert (small["served"], small["candidate"]) == ("paged", "small")
    assert small["kl_mean"]["low"] < small["kl_mean"]["value"] < small["kl_mean"]["high"]
    assert window["kl_mean"] == {"value": pytest.approx(0.6), "low": 0.0, "high": None}
    assert (window["tokens"], window["top1"]["value"], window["bytes_saved_per_request"]) == (2, 0.5, 80)


# ---------------------------------------------------------------- bounds of a board
BY_BOARD = ROLLOUT | {"guard": "board"}
BOUNDS = {"paged": {"kl_mean": 0.01}, "small": {"kl_mean": 0.02, "top1": 0.9}}
BOARD = BoardBounds(["paged"], BOUNDS, {"window": "the window answers worse"})


def test_a_guard_takes_from_the_board_what_it_was_not_given(rng: random.Random) -> None:
    guard = {"board": True, "top1": "off", "min_requests": 20}
    driver = RolloutDriver(rng, {"r": ROLLOUT | {"guard": guard}}, board="there")
    driver.rollouts.set_board(BOARD)
    assert driver.show("r")["settings"]["guard"].items() >= {"kl_mean": 0.02, "top1": None, "kl_p99": 1.0}.items()
    driver.serve(60, kl=0.04, agreed=0.5)  # within the default bound of kl_mean
    driver.rollouts.update()
    assert driver.show("r")["state"] == "rolled_back"
    assert "the mean KL divergence is" in driver.show("r")["reason"]


def test_bounds_of_the_board_hold_after_a_restart_also_if_they_have_changed(rng: random.Random, tmp_path: Path) -> None:
    for bound in (0.02, 0.03):
        driver = RolloutDriver(rng, {"r": BY_BOARD}, tmp_path / "file", board="there")
        driver.rollouts.set_board(msgspec.structs.replace(BOARD, bounds=BOUNDS | {"small": {"kl_mean": bound}}))
        assert driver.show("r")["settings"]["guard"]["kl_mean"] == bound
        assert len(driver.show("r")["history"]) == 1, "it goes on"
        driver.rollouts.close()


def test_a_roll_out_that_the_board_has_no_bounds_for_is_not_started(rng: random.Random) -> None:
    driver = RolloutDriver(rng)
    with pytest.raises(RequestError, match="the server has no board"):
        driver.rollouts.start("r", BY_BOARD, "key 1")
    driver.rollouts.set_board(BOARD)
    with pytest.raises(RequestError, match="the window answers worse"):
        driver.rollouts.start("r", BY_BOARD | {"to": "window"}, "key 1")
    assert driver.rollouts.start("r", BY_BOARD, "key 1")["settings"]["guard"]["kl_mean"] == 0.02


def test_a_roll_out_is_aborted_if_its_bounds_are_gone(rng: random.Random) -> None:
    driver = RolloutDriver(rng, {"r": BY_BOARD}, board="there")
    refused = BoardBounds(["paged"], {"paged": {}}, {"small": "it is another model"})
    driver.rollouts.set_board(refused)
    assert (driver.show("r")["state"], driver.show("r")["reason"]) == ("aborted", "it is another model")


@pytest.mark.parametrize("disabled", ["paged", "small", "the board"])
def test_bounds_stay_while_an_instance_is_disabled_or_the_board_is_gone(rng: random.Random, disabled: str) -> None:
    driver = RolloutDriver(rng, {"r": BY_BOARD}, board="there")
    driver.rollouts.set_board(BOARD)
    others = {name: bounds for name, bounds in BOUNDS.items() if name != disabled}
    later = BoardBounds([name for name in others if name == "paged"], others, BOARD.refusals)
    driver.rollouts.set_board(None if disabled == "the board" else later)
    assert (driver.show("r")["state"], driver.show("r")["settings"]["guard"]["kl_mean"]) == ("shadow", 0.02)


def test_a_bound_that_is_given_as_its_default_is_another_setting(rng: random.Random, tmp_path: Path) -> None:
    """It replaces the board's, so the roll-out begins anew."""
    for guard, bound in (({"board": True}, 0.02), ({"board": True, "kl_mean": 0.05}, 0.05)):
        driver = RolloutDriver(rng, {"r": ROLLOUT | {"guard": guard}}, tmp_path / "file", board="there")
        driver.rollouts.set_board(BOARD)
        assert driver.show("r")["settings"]["guard"]["kl_mean"] == bound
        driver.rollouts.close()
