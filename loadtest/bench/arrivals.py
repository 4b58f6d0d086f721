"""The times at which requests are sent: several at once, at random, in bursts, or as recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from random import Random
from time import perf_counter
from typing import Protocol, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Arrivals(Protocol):
    """When the requests of a workload are sent: the time of each, and how many may run at once."""

    @property
    def max_concurrency(self) -> int | None:
        """Return the maximum number of requests that run at a time; None: no maximum.

        Further requests wait, even if their time to be sent has come.
        """

    def times(self, random: Random) -> Iterator[float]:
        """Yield the time at which each request is to be sent, in seconds since sending began."""


@dataclass(frozen=True)
class Closed:
    """A closed loop: `max_concurrency` clients, each of which sends its next request after its last answer."""

    max_concurrency: int

    def times(self, random: Random) -> Iterator[float]:
        return repeat(0.0)

    def __str__(self) -> str:
        return "1 stream" if self.max_concurrency == 1 else f"{self.max_concurrency} at once"


@dataclass(frozen=True)
class Poisson:
    """An open loop: requests at random times, `rate` a second on average, no matter how many are still running."""

    rate: float
    max_concurrency: None = None

    def times(self, random: Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += random.expovariate(self.rate)
            yield now

    def __str__(self) -> str:
        return f"{self.rate:g} a second"


@dataclass(frozen=True)
class Bursts:
    """Bursts: `size` requests at the same moment, again after every `interval` seconds."""

    size: int
    interval: float
    max_concurrency: None = None

    def times(self, random: Random) -> Iterator[float]:
        return (number * self.interval for number in count() for _ in range(self.size))

    def __str__(self) -> str:
        return f"{self.size} every {self.interval:g} s"


@dataclass(frozen=True)
class Recorded:
    """The times recorded in a trace, counted from its first request and divided by `speed_up`."""

    timestamps: Sequence[float]
    speed_up: float = 1.0
    max_concurrency: None = None

    def times(self, random: Random) -> Iterator[float]:
        return ((time - self.timestamps[0]) / self.speed_up for time in self.timestamps)

    def __str__(self) -> str:
        return "as recorded" + (f", {self.speed_up:g} times as fast" if self.speed_up != 1 else "")


async def send_requests(
    requests: Sequence[Request],
    arrivals: Arrivals,
    send: Callable[[Request], Awaitable[Result]],
    random: Random,
    clock: Callable[[], float] = perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Result]:
    """Send each request at the time that `arrivals` gives it; return the results in the order of `requests`."""
    places = asyncio.Semaphore(arrivals.max_concurrency or max(1, len(requests)))
    start = clock()

    async def send_one(request: Request, due: float) -> Result:
        if (delay := start + due - clock()) > 0:
            await sleep(delay)
        async with places:
            return await send(request)

    return list(
        await asyncio.gather(*(send_one(*each) for each in zip(requests, arrivals.times(random), strict=False)))
    )
