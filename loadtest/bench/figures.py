"""What outcomes come to: times, percentiles, tokens a second. Knows neither HTTP nor workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import NamedTuple

from loadtest.bench.ask import Outcome

PERCENTILES = (50, 90, 95, 99)


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """With linear interpolation, as numpy's."""
    if len(values) == 1:
        return dict.fromkeys(PERCENTILES, values[0])
    cuts = quantiles(values, n=100, method="inclusive")
    return {each: cuts[each - 1] for each in PERCENTILES}


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    """In milliseconds; None if there are none."""
    values = [each * 1000 for each in seconds]
    if not values:
        return None
    found = {f"p{each}": value for each, value in percentiles(values).items()}
    return {"mean": fmean(values), **found, "max": max(values)}


class Key(NamedTuple):
    """What figures are about."""

    workload: str
    phase: str  # cold or warm, or empty
    strategy: str  # where there are none, the model


@dataclass
class Figures:
    """All rounds of one workload, or of one of its phases, under one strategy."""

    rounds: list[list[Outcome]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # that each round took

    def add(self, outcomes: list[Outcome]) -> None:
        """A round: from the first request that was sent to the last answer's end."""
        self.rounds.append(outcomes)
        ends = [outcome.reply.end for outcome in outcomes if outcome.reply.end is not None]
        self.seconds.append(max(ends) - min(outcome.sent for outcome in outcomes) if ends else 0.0)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for outcomes in self.rounds for outcome in outcomes]

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    @property
    def short(self) -> int:
        """Answers that have not the length that was asked for."""
        return sum(outcome.reply.completion_tokens != outcome.asked for outcome in self.good)

    def ttft(self) -> dict[str, float] | None:
        """From the request to the first piece of the answer."""
        return spread(o.reply.arrivals[0] - o.sent for o in self.good if o.reply.arrivals)

    def itl(self) -> dict[str, float] | None:
        """From piece to piece."""
        return spread(gap for o in self.good for gap in o.reply.gaps())

    def e2e(self) -> dict[str, float] | None:
        """From the request to the end of the answer."""
        return spread(o.reply.end - o.sent for o in self.good if o.reply.end is not None)

    @property
    def pieces(self) -> int:
        return sum(len(o.reply.arrivals) for o in self.good)

    @property
    def prompt_tokens(self) -> int:
        return sum(o.reply.prompt_tokens for o in self.good)

    @property
    def completion_tokens(self) -> int:
        return sum(o.reply.completion_tokens for o in self.good)

    @property
    def cached_tokens(self) -> int | None:
        """None if the server does not tell."""
        told = [o.reply.cached_tokens for o in self.good if o.reply.cached_tokens is not None]
        return sum(told) if told else None

    @property
    def cached(self) -> float | None:
        """Share of the prompts' tokens that were found in a cache."""
        found = self.cached_tokens
        return None if found is None or not self.prompt_tokens else found / self.prompt_tokens

    def speeds(self) -> list[float]:
        """Tokens of answers a second, in each round that had any."""
        counts = [sum(o.reply.completion_tokens for o in each if o.error is None) for each in self.rounds]
        return [tokens / seconds for tokens, seconds in zip(counts, self.seconds, strict=True) if seconds]

    @property
    def speed(self) -> float | None:
        seconds = sum(self.seconds)
        return self.completion_tokens / seconds if seconds else None
