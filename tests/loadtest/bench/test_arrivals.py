"""Requests are sent when they are due, by a simulated clock."""

from __future__ import annotations

import asyncio
from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from loadtest.bench.arrivals import Arrivals, Bursts, Closed, Poisson, Recorded, send_requests


def times(arrivals: Arrivals, count: int) -> list[float]:
    return list(islice(arrivals.times(Random(1)), count))


class Clock:
    """A simulated clock: time advances to the next of those who sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleepers: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds
        self.sleepers.append(due)
        while self.now < due:
            await asyncio.sleep(0)
            if min(self.sleepers) == due:
                self.now = due
        self.sleepers.remove(due)


def sent(arrivals: Arrivals, count: int, duration: float) -> tuple[list[float], int]:
    """Return when each request was sent, and the maximum number that ran at a time; each takes `seconds`."""
    clock, under_way, most = Clock(), 0, 0

    async def send(number: int) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        began = clock()
        await clock.sleep(duration)
        under_way -= 1
        return began

    began = asyncio.run(send_requests(range(count), arrivals, send, Random(1), clock, clock.sleep))
    return [each - 100.0 for each in began], most


def test_closed_loop() -> None:
    began, most = sent(Closed(3), 7, duration=2.0)
    assert began == [0, 0, 0, 2, 2, 2, 4]
    assert most == 3


def test_bursts_come_whatever_is_under_way() -> None:
    began, most = sent(Bursts(2, interval=5.0), 5, duration=7.0)
    assert began == [0, 0, 5, 5, 10]
    assert most == 4


def test_recorded_times_begin_with_the_first() -> None:
    arrivals = Recorded((30.0, 31.0, 35.0), speed_up=2.0)
    assert times(arrivals, 9) == [0, 0.5, 2.5]
    assert sent(arrivals, 3, duration=100.0) == ([0, 0.5, 2.5], 3)


def test_poisson_has_its_mean_and_no_memory() -> None:
    arrivals = Poisson(4.0)
    gaps = [later - earlier for earlier, later in pairwise(times(arrivals, 20_001))]
    assert min(gaps) > 0
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 4, rel=0.03)  # as an exponential distribution's
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(0.3679, rel=0.03)
    assert times(arrivals, 9) == times(arrivals, 9)
    began, _ = sent(arrivals, 9, duration=1.0)
    assert began == pytest.approx(times(arrivals, 9))


def test_they_are_described() -> None:
    described = [str(each) for each in (Closed(1), Closed(8), Poisson(0.5), Bursts(4, 10.0), Recorded((), 2.0))]
    assert described == [
        "1 stream",
        "8 at once",
        "0.5 a second",
        "4 every 10 s",
        "as recorded, 2 times as fast",
    ]
