"""Rounds of a benchmark, in which the strategies take turns at a workload.

Within a round every strategy gets the same requests, as strategies share no cached tokens. Each round has new requests,
so that no cache has them from an earlier round, and begins with another strategy. The mixed measurement, which
distributes requests among all strategies, has requests of its own, which no strategy has in its cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

from loadtest.bench.arrivals import Arrivals, Closed, send_requests
from loadtest.bench.figures import Figures, Key
from loadtest.bench.types import BenchRequest, Outcome
from loadtest.bench.vocabulary import PromptVocabulary
from loadtest.bench.workloads import Workload

MAX_WARM_UP_REQUESTS = 8  # maximum number of requests that are sent before a strategy is measured
MAX_WARM_UP_TOKENS = 8  # maximum number of tokens of the answer to each warm-up request
MAX_WARM_UP_PROMPTS = 16_384  # maximum number of tokens of all warm-up prompts together, if there are several


@dataclass(frozen=True)
class Rounds:
    """Measures workloads under all strategies in `rounds` rounds."""

    strategies: Mapping[str, Sequence[str]]  # model names to send requests to ("tiny:paged"), by strategy or "mixed"
    vocabulary: PromptVocabulary
    seed: int
    rounds: int
    # sends a request; arguments: model name, request, whether the progress bar counts it
    send: Callable[[str, BenchRequest, bool], Awaitable[Outcome]]
    show_status: Callable[[str], None]  # called with a text that describes the current measurement
    warms_up: bool = True  # send a few unmeasured requests first

    async def measure(self, workload: Workload) -> dict[Key, Figures]:
        """Measure a workload; return the figures of each of its phases under each strategy."""
        figures = {Key(workload.name, phase, name): Figures() for phase in workload.phases for name in self.strategies}
        for models in self.strategies.values():
            if self.warms_up and len(models) == 1:
                await self._warm_up(workload, models)
        for number in range(self.rounds):
            for name in rotate(list(self.strategies), number):
                for phase in workload.phases:
                    key = Key(workload.name, phase, name)
                    figures[key].add_round(await self._run_phase(workload, number, key))
        return figures

    async def _run_phase(self, workload: Workload, number: int, key: Key) -> list[Outcome]:
        models = self.strategies[key.strategy]
        salt = f"{self.seed}/{workload.name}/{number}" + ("" if len(models) == 1 else "/mixed")
        requests = workload.make_requests(self.vocabulary, salt, key.phase)
        self.show_status(" ".join(filter(None, key)))
        return await self._send_requests(requests, models, workload.arrivals, Random(f"{salt}/times"), counts=True)

    async def _send_requests(
        self,
        requests: Sequence[BenchRequest],
        models: Sequence[str],
        arrivals: Arrivals,
        random: Random,
        *,
        counts: bool,
    ) -> list[Outcome]:
        dealt = list(zip(cycle(models), requests, strict=False))
        return await send_requests(dealt, arrivals, lambda each: self.send(*each, counts), random)

    async def _warm_up(self, workload: Workload, models: Sequence[str]) -> None:
        """Send a few unmeasured requests with prompts as long as the workload's, but other tokens and short answers."""
        requests = workload.make_requests(self.vocabulary, f"{self.seed}/{workload.name}/warm-up", workload.phases[0])
        few = [
            BenchRequest(request.prompt, min(request.max_tokens, MAX_WARM_UP_TOKENS))
            for request in requests[: count_warm_up_requests(requests)]
        ]
        await self._send_requests(
            few, models, Closed(workload.arrivals.max_concurrency or len(few)), Random(), counts=False
        )


def count_warm_up_requests(requests: Sequence[BenchRequest]) -> int:
    """Return how many of the requests are sent before a strategy is measured, at least one."""
    longest = max((len(request.prompt) for request in requests), default=1)
    return min(MAX_WARM_UP_REQUESTS, max(1, MAX_WARM_UP_PROMPTS // max(1, longest)))


def rotate(names: list[str], by: int) -> list[str]:
    """Return the names in the same order, beginning with the one at index `by` (modulo their number)."""
    by %= len(names)
    return names[by:] + names[:by]
