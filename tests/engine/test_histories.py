"""Random histories of arrivals, cancellations and steps in tiny memory: the books always add up, and all is right.

Texts have beginnings in common, instances have blocks of several sizes, priorities cross. A history ends by letting
everybody finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.messages import Sampling
from tests.engine.driving import Driver, least_memory, strategies
from tests.engine.reference import Reference, random_prompt

WINDOW, SINKS = 10, 2
COMMON = random_prompt(26, seed=5)
PROMPTS = [
    *(COMMON[:n] for n in (1, 4, 8, 9, 24, 26)),
    *(COMMON[:n] + random_prompt(tail, seed=6) for n, tail in ((8, 3), (16, 1), (16, 9), (24, 5), (25, 8))),
    *(random_prompt(n, seed=6) for n in (2, 13, 30)),
]
EXAMPLES = 20
MOST = 9  # tokens a request may ask for
SETTINGS: dict[str, Any] = {
    "strategies": strategies(
        paged={"kind": "paged", "block_size": 4},
        pairs={"kind": "paged", "block_size": 8, "floor": "10%"},
        private={"kind": "paged", "block_size": 5, "prefix_cache": False, "limit": "95%"},
        sliding_window={"kind": "sliding_window", "window": WINDOW, "sinks": SINKS, "max_row": 4},
    ),
    "max_seq_len": 44,
    "max_num_seqs": 5,
    "max_waiting": 6,
    "kv_overcommit": 9,
}
INSTANCES = ("paged", "pairs", "private", "contiguous", "sliding_window")


class Arrival(NamedTuple):
    prompt: int
    instance: str
    max_tokens: int
    priority: int
    drawn: bool


class Cancellation(NamedTuple):
    newest: int  # the how-manieth arrival, counted from the last


class Steps(NamedTuple):
    many: int


Action = Arrival | Cancellation | Steps

ARRIVALS = st.builds(
    Arrival,
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from(INSTANCES),
    st.integers(1, MOST),
    st.integers(0, 2),
    st.booleans(),
)
HISTORIES: st.SearchStrategy[list[Action]] = st.lists(
    ARRIVALS | ARRIVALS | st.builds(Cancellation, st.integers(0, 5)) | st.builds(Steps, st.integers(1, 6)),
    min_size=3,
    max_size=24,
)


class History:
    """Plays actions and knows what must come of them."""

    def __init__(self, driver: Driver, reference: Reference) -> None:
        self._driver, self._reference = driver, reference
        self._arrivals: list[Arrival] = []
        self._cancelled: set[int] = set()

    def play(self, action: Action) -> None:
        match action:
            case Arrival():
                self._arrive(action)
            case Cancellation(newest):
                if newest < len(self._arrivals):
                    self._cancelled.add(len(self._arrivals) - 1 - newest)
                    self._driver.cancel(str(len(self._arrivals) - 1 - newest))
            case Steps(many):
                for _ in range(many):
                    self._driver.step()

    def end(self) -> None:
        """Everybody is answered in full, or refused for a full queue, or has been told a part."""
        self._driver.run(at_most=60 * (len(self._arrivals) + 1))
        for i, arrival in enumerate(self._arrivals):
            heard, expected = self._driver.heard[str(i)], self._expected(arrival)
            if heard.failed is not None:
                assert heard.failed.status == 429
            elif i in self._cancelled:
                assert heard.tokens == expected[: len(heard.tokens)], arrival
            else:
                assert (heard.tokens, heard.finish_reason) == (expected, "length"), arrival

    def _arrive(self, arrival: Arrival) -> None:
        prompt, instance, max_tokens, priority, _ = arrival
        sampling = _sampling(arrival)
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed}
        name = str(len(self._arrivals))
        self._arrivals.append(arrival)
        self._driver.submit(name, PROMPTS[prompt], max_tokens, kv_cache=instance, priority=priority, **drawn)

    def _expected(self, arrival: Arrival) -> list[int]:
        prompt, instance, max_tokens, _, drawn = arrival
        if instance == "sliding_window":
            return self._reference.windowed(PROMPTS[prompt], MOST, window=WINDOW, sinks=SINKS)[:max_tokens]
        if drawn:
            return self._reference.sampled(PROMPTS[prompt], _sampling(arrival))
        return self._reference.greedy(PROMPTS[prompt], MOST)[:max_tokens]


def _sampling(arrival: Arrival) -> Sampling:
    drawn = arrival.drawn and arrival.instance != "sliding_window"
    return Sampling(
        arrival.max_tokens, 0.9 if drawn else 0.0, top_k=10 if drawn else 0, seed=arrival.prompt, ignore_eos=True
    )


_idle: dict[int, Driver] = {}


@contextmanager
def a_driver(tiny: Path, max_step_tokens: int) -> Iterator[Driver]:
    """With memory for one sequence and a bit; used again if it has been left as it was found."""
    sized = SETTINGS | {"max_step_tokens": max_step_tokens}
    driver = _idle.pop(max_step_tokens, None)
    if driver is None:
        driver = Driver(tiny, **sized, kv_memory=str(int(least_memory(tiny, **sized) * 1.25)))
    yield driver
    driver.assert_nothing_leaked()
    driver.heard.clear()
    driver.steps.clear()
    _idle[max_step_tokens] = driver


@pytest.mark.parametrize("max_step_tokens", [3, 16])
def test_whatever_happens_everybody_is_answered_rightly(tiny: Path, reference: Reference, max_step_tokens: int) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(HISTORIES)
    def check(actions: list[Action]) -> None:
        with a_driver(tiny, max_step_tokens) as driver:
            history = History(driver, reference)
            for action in actions:
                history.play(action)
            history.end()

    check()
