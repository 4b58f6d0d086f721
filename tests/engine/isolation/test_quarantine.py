"""When an instance is in quarantine, for how long, and what ends it."""

from __future__ import annotations

from server.engine.isolation.quarantine import FAULTS, FIRST_SECONDS, MAX_SECONDS, Quarantine


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def quarantined() -> tuple[Quarantine, Clock]:
    clock = Clock()
    quarantine = Quarantine(["a", "b"], clock)
    found = [quarantine.record_fault("a") for _ in range(FAULTS)]
    assert found == [False] * (FAULTS - 1) + [True]
    return quarantine, clock


def test_faults_in_a_row_begin_it_for_their_instance_alone() -> None:
    quarantine, clock = quarantined()
    assert quarantine.list_quarantined() == ["a"]
    assert (quarantine.seconds_left("a"), quarantine.seconds_left("b")) == (FIRST_SECONDS, None)
    clock.now += FIRST_SECONDS - 0.5
    assert quarantine.seconds_left("a") == 1.0, "clients are not asked to come back at once"
    clock.now += 0.5
    assert quarantine.seconds_left("a") == 0.0


def test_a_computed_step_between_faults_puts_it_off() -> None:
    quarantine = Quarantine(["a"], Clock())
    for _ in range(3 * FAULTS):
        assert not quarantine.record_fault("a")
        quarantine.record_step("a")
    assert quarantine.seconds_left("a") is None


def test_one_request_tries_the_instance_and_ends_it() -> None:
    quarantine, clock = quarantined()
    clock.now += FIRST_SECONDS
    quarantine.begin_probe("a")
    assert quarantine.seconds_left("a") == 1.0, "the others wait for the outcome"
    quarantine.record_success("a")
    assert quarantine.seconds_left("a") is None
    assert not quarantine.record_fault("a"), "the count begins anew"


def test_a_request_that_ends_well_before_the_trial_does_not_end_it() -> None:
    quarantine, _ = quarantined()
    quarantine.record_success("a")
    assert quarantine.seconds_left("a") == FIRST_SECONDS


def test_a_fault_in_the_trial_doubles_it_up_to_a_limit() -> None:
    quarantine, clock = quarantined()
    lengths = []
    for _ in range(8):
        lengths.append(quarantine.seconds_left("a"))
        clock.now += MAX_SECONDS
        assert quarantine.seconds_left("a") == 0.0
        quarantine.begin_probe("a")
        assert quarantine.record_fault("a")
    assert lengths == [30, 60, 120, 240, 480, 600, 600, 600]


def test_a_trial_that_is_cancelled_lets_the_next_request_try() -> None:
    quarantine, clock = quarantined()
    clock.now += FIRST_SECONDS
    quarantine.begin_probe("a")
    quarantine.end_probe("a")
    assert quarantine.seconds_left("a") == 0.0
