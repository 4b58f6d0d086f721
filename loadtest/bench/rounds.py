"""Strategies take turns at a workload, round by round. Knows how to be fair; neither HTTP nor what figures mean.

Within a round every strategy gets the same requests, since instances share no cache; in another round the requests are
others, so that none finds what an earlier one left. Who begins changes from round to round.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

from loadtest.bench.arrivals import Closed, drive
from loadtest.bench.ask import Ask, Outcome
from loadtest.bench.figures import Figures, Key
from loadtest.bench.vocabulary import Vocabulary
from loadtest.bench.workloads import Workload

WARM_UP = 8  # requests at most, all at once, before a strategy is measured
WARM_UP_ANSWER = 8  # tokens at most


@dataclass(frozen=True)
class Rounds:
    """Measures workloads."""

    strategies: Mapping[str, str]  # the model's name under each
    vocabulary: Vocabulary
    seed: int
    rounds: int
    send: Callable[[str, Ask, bool], Awaitable[Outcome]]  # to the model of that name; does it count?
    tell: Callable[[str], None]  # what is measured now

    async def measure(self, workload: Workload) -> dict[Key, Figures]:
        """Figures of each phase under each strategy."""
        figures = {Key(workload.name, phase, name): Figures() for phase in workload.phases for name in self.strategies}
        for model in self.strategies.values():
            await self._warm_up(workload, model)
        for number in range(self.rounds):
            for name in turned(list(self.strategies), number):
                for phase in workload.phases:
                    key = Key(workload.name, phase, name)
                    figures[key].add(await self._run(workload, number, key))
        return figures

    async def _run(self, workload: Workload, number: int, key: Key) -> list[Outcome]:
        salt, model = f"{self.seed}/{workload.name}/{number}", self.strategies[key.strategy]
        asks = workload.asks(self.vocabulary, salt, key.phase)
        self.tell(" ".join(filter(None, key)))
        return await drive(asks, workload.arrivals, lambda ask: self.send(model, ask, True), Random(f"{salt}/times"))

    async def _warm_up(self, workload: Workload, model: str) -> None:
        """Requests as long as the workload's own, with short answers; none of those begins like these."""
        asks = workload.asks(self.vocabulary, f"{self.seed}/{workload.name}/warm-up", workload.phases[0])
        few = [Ask(ask.prompt, min(ask.answer, WARM_UP_ANSWER)) for ask in asks[:WARM_UP]]
        await drive(
            few, Closed(workload.arrivals.at_once or len(few)), lambda ask: self.send(model, ask, False), Random()
        )


def turned(names: list[str], by: int) -> list[str]:
    """The same in the same order, beginning with another."""
    by %= len(names)
    return names[by:] + names[:by]
