"""When requests are sent: so many at once, by chance, in bursts, or as recorded. Does not know what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from random import Random
from time import perf_counter
from typing import Protocol, TypeVar

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Arrivals(Protocol):
    """When each request is due."""

    @property
    def at_once(self) -> int | None:
        """Requests that may be under way together; those that are due wait. None: any number."""

    def times(self, random: Random) -> Iterator[float]:
        """Seconds since the start, as many as are asked for."""


@dataclass(frozen=True)
class Closed:
    """So many clients, each of which sends its next request when it has its answer."""

    at_once: int

    def times(self, random: Random) -> Iterator[float]:
        return repeat(0.0)

    def __str__(self) -> str:
        return "1 stream" if self.at_once == 1 else f"{self.at_once} at once"


@dataclass(frozen=True)
class Poisson:
    """Clients who know nothing of each other: so many a second on average, whatever is still under way."""

    rate: float
    at_once: None = None

    def times(self, random: Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += random.expovariate(self.rate)
            yield now

    def __str__(self) -> str:
        return f"{self.rate:g} a second"


@dataclass(frozen=True)
class Bursts:
    """Nothing, then so many in the same moment, every so many seconds."""

    size: int
    every: float
    at_once: None = None

    def times(self, random: Random) -> Iterator[float]:
        return (number * self.every for number in count() for _ in range(self.size))

    def __str__(self) -> str:
        return f"{self.size} every {self.every:g} s"


@dataclass(frozen=True)
class Recorded:
    """Times of a trace, which begin with the first and pass `speed_up` times as fast."""

    recorded: Sequence[float]
    speed_up: float = 1.0
    at_once: None = None

    def times(self, random: Random) -> Iterator[float]:
        return ((time - self.recorded[0]) / self.speed_up for time in self.recorded)

    def __str__(self) -> str:
        return "as recorded" + (f", {self.speed_up:g} times as fast" if self.speed_up != 1 else "")


async def drive(
    asks: Sequence[Ask],
    arrivals: Arrivals,
    send: Callable[[Ask], Awaitable[Answer]],
    random: Random,
    clock: Callable[[], float] = perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Answer]:
    """Sends each when it is due; the answers in the order of `asks`."""
    places = asyncio.Semaphore(arrivals.at_once or max(1, len(asks)))
    start = clock()

    async def one(ask: Ask, due: float) -> Answer:
        if (wait := start + due - clock()) > 0:
            await sleep(wait)
        async with places:
            return await send(ask)

    return list(await asyncio.gather(*(one(*each) for each in zip(asks, arrivals.times(random), strict=False))))
