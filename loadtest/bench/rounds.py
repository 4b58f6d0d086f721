"""Strategies take turns at a workload, round by round. Knows how to be fair; neither HTTP nor what figures mean.

Within a round every strategy gets the same requests, since instances share no cache; in another round the requests are
others, so that none finds what an earlier one left. Who begins changes from round to round. Where strategies are mixed,
requests are dealt among them, and are others again, since each of them has seen those of its own turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

from loadtest.bench.arrivals import Arrivals, Closed, drive
from loadtest.bench.ask import Ask, Outcome
from loadtest.bench.figures import Figures, Key
from loadtest.bench.vocabulary import PromptVocabulary
from loadtest.bench.workloads import Workload

WARM_UP = 8  # requests at most, all at once, before a strategy is measured
WARM_UP_ANSWER = 8  # tokens at most


@dataclass(frozen=True)
class Rounds:
    """Measures workloads."""

    strategies: Mapping[str, Sequence[str]]  # the model's name under each; several where they are mixed
    vocabulary: PromptVocabulary
    seed: int
    rounds: int
    send: Callable[[str, Ask, bool], Awaitable[Outcome]]  # to the model of that name; does it count?
    tell: Callable[[str], None]  # what is measured now

    async def measure(self, workload: Workload) -> dict[Key, Figures]:
        """Figures of each phase under each strategy."""
        figures = {Key(workload.name, phase, name): Figures() for phase in workload.phases for name in self.strategies}
        for models in self.strategies.values():
            if len(models) == 1:
                await self._warm_up(workload, models)
        for number in range(self.rounds):
            for name in turned(list(self.strategies), number):
                for phase in workload.phases:
                    key = Key(workload.name, phase, name)
                    figures[key].add(await self._run(workload, number, key))
        return figures

    async def _run(self, workload: Workload, number: int, key: Key) -> list[Outcome]:
        models = self.strategies[key.strategy]
        salt = f"{self.seed}/{workload.name}/{number}" + ("" if len(models) == 1 else "/mixed")
        asks = workload.asks(self.vocabulary, salt, key.phase)
        self.tell(" ".join(filter(None, key)))
        return await self._drive(asks, models, workload.arrivals, Random(f"{salt}/times"), counts=True)

    async def _drive(
        self, asks: Sequence[Ask], models: Sequence[str], arrivals: Arrivals, random: Random, *, counts: bool
    ) -> list[Outcome]:
        dealt = list(zip(cycle(models), asks, strict=False))
        return await drive(dealt, arrivals, lambda each: self.send(*each, counts), random)

    async def _warm_up(self, workload: Workload, models: Sequence[str]) -> None:
        """Requests as long as the workload's own, with short answers; none of those begins like these."""
        asks = workload.asks(self.vocabulary, f"{self.seed}/{workload.name}/warm-up", workload.phases[0])
        few = [Ask(ask.prompt, min(ask.answer, WARM_UP_ANSWER)) for ask in asks[:WARM_UP]]
        await self._drive(few, models, Closed(workload.arrivals.at_once or len(few)), Random(), counts=False)


def turned(names: list[str], by: int) -> list[str]:
    """The same in the same order, beginning with another."""
    by %= len(names)
    return names[by:] + names[:by]
