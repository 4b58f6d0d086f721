"""Advice follows from the figures: the fastest exact strategy, the smallest that is close, and what is beaten."""

from __future__ import annotations

from dataclasses import replace

from tools.comparison.advice import Candidate, advise
from tools.comparison.fidelity import StrategyFidelity
from tools.comparison.figures import Summary
from tools.comparison.plan import Load

LOAD = Load(512, 4)
EXACT = StrategyFidelity(0.0, 1.0, 5.0)


def candidate(
    name: str,
    speed: float,
    memory: float,
    fidelity: StrategyFidelity | None = EXACT,
    *,
    noise: float = 1,
    errors: int = 0,
) -> Candidate:
    summary = Summary(speed, speed - noise, speed + noise)
    return Candidate(name, fidelity is EXACT, summary, Summary(memory, memory, memory), fidelity, errors)


def lossy(kl: float) -> StrategyFidelity:
    return StrategyFidelity(kl, 0.95, 5.1)


def test_the_fastest_exact_strategy_is_the_first_choice() -> None:
    found = advise(LOAD, [candidate("a", 100, 8), candidate("b", 120, 9), candidate("c", 500, 1, lossy(0.5))], 0.01)
    assert found.exact is not None
    assert found.exact.strategy == "b"
    assert found.exact.reason == "120 tokens/s in 9.0 MiB, and no answer changes; next a: 100 tokens/s in 8.0 MiB"


def test_of_equal_speeds_the_smaller_memory_is_chosen() -> None:
    found = advise(LOAD, [candidate("a", 118, 4, noise=3), candidate("b", 120, 9, noise=3)], 0.01)
    assert found.exact is not None
    assert found.exact.strategy == "a"
    assert "b is as fast in the range of the rounds, and takes 9.0 MiB" in found.exact.reason


def test_the_smallest_within_the_bound_is_chosen_where_memory_is_short() -> None:
    candidates = [
        candidate("paged", 100, 8),
        candidate("int8", 90, 4, lossy(0.001)),
        candidate("half", 110, 3, lossy(0.02)),
    ]
    found = advise(LOAD, candidates, 0.01)
    assert found.small is not None
    assert found.small.strategy == "int8"
    assert found.small.reason.startswith(
        "50% of the memory of paged at 90% of its speed; KL 0.001 nats, the same likeliest token at 95.0%"
    )
    wider = advise(LOAD, candidates, 0.05)
    assert wider.small is not None
    assert wider.small.strategy == "half"
    assert advise(LOAD, candidates[:1], 0.01).small is None, "nothing is smaller"


def test_what_fails_or_was_not_measured_is_never_chosen() -> None:
    unmeasured = Candidate("u", True, None, None, EXACT)
    found = advise(LOAD, [candidate("a", 900, 1, errors=1), unmeasured, candidate("b", 10, 2)], 0.01)
    assert found.exact is not None
    assert found.exact.strategy == "b"
    nothing = advise(LOAD, [unmeasured], 0.01)
    assert (nothing.exact, nothing.small, nothing.dominated) == (None, None, {})


def test_without_fidelity_only_exact_strategies_are_advised() -> None:
    exact = replace(candidate("paged", 100, 8), fidelity=None)
    small = replace(candidate("contiguous", 50, 4), fidelity=None)
    found = advise(LOAD, [exact, small, candidate("lossy", 200, 1, None)], 0.01)
    assert found.exact is not None
    assert found.exact.strategy == "paged"
    assert found.small is not None
    assert found.small.strategy == "contiguous"
    assert found.small.reason.endswith("no answer changes")


def test_a_lossy_strategy_beats_no_exact_one() -> None:
    found = advise(LOAD, [candidate("paged", 100, 8), candidate("unused", 200, 4, lossy(0.0))], 0.01)
    assert found.dominated == {}
    assert advise(LOAD, [candidate("paged", 300, 4), candidate("unused", 200, 4, lossy(0.0))], 0.01).dominated


def test_a_strategy_is_beaten_by_one_that_is_better_in_everything() -> None:
    candidates = [
        candidate("paged", 100, 8),
        candidate("mirrored", 50, 20),
        candidate("overlaps", 99.5, 8),  # not slower in every round
        candidate("small", 50, 4, lossy(0.5)),  # less memory
        candidate("worse", 50, 9, lossy(0.5)),
    ]
    assert advise(LOAD, candidates, 0.01).dominated == {"mirrored": "paged", "worse": "paged"}
