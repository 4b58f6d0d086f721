"""Figures of a benchmark, computed from the outcomes of requests: times, percentiles, tokens a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, quantiles
from typing import NamedTuple

from loadtest.bench.types import Outcome

PERCENTILES = (50, 90, 95, 99)


def compute_percentiles(values: Sequence[float]) -> dict[int, float]:
    """Return the PERCENTILES (50, 90, 95, 99) of the values, interpolated linearly as by numpy.percentile."""
    if len(values) == 1:
        return dict.fromkeys(PERCENTILES, values[0])
    cuts = quantiles(values, n=100, method="inclusive")
    return {each: cuts[each - 1] for each in PERCENTILES}


def summarize_latency(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum, in milliseconds, of times in seconds; None if there are no times."""
    values = [each * 1000 for each in seconds]
    if not values:
        return None
    found = {f"p{each}": value for each, value in compute_percentiles(values).items()}
    return {"mean": fmean(values), **found, "max": max(values)}


class Key(NamedTuple):
    """Identifies a row of the report: the workload, phase and strategy that its figures belong to."""

    workload: str
    phase: str  # phase of the workload: "cold" or "warm"; empty for a workload without phases
    strategy: str  # name of the strategy; the model's name if the server has no strategies


@dataclass
class Figures:
    """The outcomes of all requests of one workload, or of one of its phases, under one strategy; and their figures."""

    rounds: list[list[Outcome]] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)  # duration of each round, in seconds

    def add_round(self, outcomes: list[Outcome]) -> None:
        """Add a round's outcomes, and its duration from the first request sent to the end of the last answer."""
        self.rounds.append(outcomes)
        ends = [outcome.reply.end_time for outcome in outcomes if outcome.reply.end_time is not None]
        self.round_seconds.append(max(ends) - min(outcome.send_time for outcome in outcomes) if ends else 0.0)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for outcomes in self.rounds for outcome in outcomes]

    @property
    def successes(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def error_counts(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)

    @property
    def num_wrong_length(self) -> int:
        """Return the number of answers whose number of tokens is not the requested one."""
        return sum(outcome.reply.completion_tokens != outcome.requested_tokens for outcome in self.successes)

    def ttft(self) -> dict[str, float] | None:
        """Return mean, percentiles and maximum (ms) of the times from sending a request to its first token."""
        return summarize_latency(
            o.reply.arrival_times[0] - o.send_time for o in self.successes if o.reply.arrival_times
        )

    def itl(self) -> dict[str, float] | None:
        """Return mean, percentiles and maximum (ms) of the times between consecutive pieces of an answer."""
        return summarize_latency(gap for o in self.successes for gap in o.reply.gaps())

    def full_batch_itl(self) -> dict[str, float] | None:
        """Return mean, percentiles and maximum (ms) of the times between pieces while all requests of a round decode.

        No prompt of the round is computed meanwhile. None if there is no such time, as when requests wait for others.
        """
        return summarize_latency(gap for outcomes in self.rounds for gap in _iter_full_batch_gaps(outcomes))

    def e2e(self) -> dict[str, float] | None:
        """Return mean, percentiles and maximum (ms) of the times from a request to the end of its answer."""
        return summarize_latency(o.reply.end_time - o.send_time for o in self.successes if o.reply.end_time is not None)

    @property
    def pieces(self) -> int:
        return sum(len(o.reply.arrival_times) for o in self.successes)

    @property
    def prompt_tokens(self) -> int:
        return sum(o.reply.prompt_tokens for o in self.successes)

    @property
    def completion_tokens(self) -> int:
        return sum(o.reply.completion_tokens for o in self.successes)

    @property
    def cached_tokens(self) -> int | None:
        """Return the number of prompt tokens that were found in a cache; None if the server does not report it."""
        reported = [o.reply.cached_tokens for o in self.successes if o.reply.cached_tokens is not None]
        return sum(reported) if reported else None

    @property
    def cache_hit_rate(self) -> float | None:
        """Return the share, 0 to 1, of prompt tokens found in a cache; None if the server does not report it."""
        cached = self.cached_tokens
        return None if cached is None or not self.prompt_tokens else cached / self.prompt_tokens

    def output_throughput_by_round(self) -> list[float]:
        """Return each round's generated tokens per second; rounds without a finished answer are left out."""
        counts = [sum(o.reply.completion_tokens for o in each if o.error is None) for each in self.rounds]
        return [tokens / seconds for tokens, seconds in zip(counts, self.round_seconds, strict=True) if seconds]

    @property
    def output_throughput(self) -> float | None:
        seconds = sum(self.round_seconds)
        return self.completion_tokens / seconds if seconds else None


def _iter_full_batch_gaps(outcomes: Sequence[Outcome]) -> Iterator[float]:
    """Yield the seconds between pieces from the last answer's first piece until the first answer's last piece."""
    times = [outcome.reply.arrival_times for outcome in outcomes]
    if not all(times) or any(outcome.error is not None for outcome in outcomes):
        return
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    for each in times:
        yield from (later - earlier for earlier, later in pairwise(each) if begin <= earlier and later <= end)
