"""Decides from statistics and a guard's bounds whether a roll-out's candidate is too bad, good enough, or undecided.

- It trips if the confidence interval of a figure lies wholly beyond its bound, from LEAST_REQUESTS requests on, and for
  errors from LEAST_FAILURES failures on. Requests of one conversation count as one there.
- It passes a stage if there are `min_requests` requests, every figure that can be measured keeps its bound, and no
  interval lies wholly beyond one.

The intervals are those of GUARD_CONFIDENCE: a guard looks ten times a second, and with 95 % it would trip by chance in
far more than one of twenty roll-outs. Knows no stages: it is given the statistics of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from config.rollouts import GuardSettings
from server.rollouts.intervals import Estimate, quantile_ratio
from server.rollouts.statistics import ArmStatistics, FidelityStatistics

GUARD_CONFIDENCE = 0.99
LEAST_REQUESTS = 8  # a guard does not trip on fewer: a grossly broken candidate is found by this number
LEAST_FAILURES = 2  # nor on one failed request, or on the failed requests of one conversation


class GuardCheck(NamedTuple):
    """A figure beside its bound."""

    key: str  # that of the bound in GuardSettings
    name: str  # what it is, for a sentence
    estimate: Estimate
    bound: float
    requests: int  # number of requests from which it was computed
    smaller_is_better: bool = True
    conversations: int | None = None  # of these requests, if those of one are alike; None: requests are independent
    failures: int | None = None  # number of conversations with failed requests, if that is what is counted

    @property
    def is_beyond(self) -> bool:
        """Whether the interval lies wholly beyond the bound."""
        return self.estimate.low > self.bound if self.smaller_is_better else self.estimate.high < self.bound

    @property
    def is_within(self) -> bool:
        """Whether the figure itself keeps the bound; an unknown one does not."""
        value = self.estimate.value
        return value <= self.bound if self.smaller_is_better else value >= self.bound

    @property
    def verdict(self) -> Literal["tripped", "undecided", "within"]:
        if self.is_beyond:
            independent = self.requests if self.conversations is None else self.conversations
            is_chance = independent < LEAST_REQUESTS or (self.failures is not None and self.failures < LEAST_FAILURES)
            return "undecided" if is_chance else "tripped"
        return "within" if self.is_within else "undecided"

    def __str__(self) -> str:
        limit = "at most" if self.smaller_is_better else "at least"
        if math.isnan(self.estimate.value):
            return f"{self.name} is not known yet, {limit} {self.bound:g} is allowed"
        interval = f"{GUARD_CONFIDENCE:.0%} interval over {self.requests} requests"
        low, high = (_format_end(end) for end in self.estimate[1:])
        return (
            f"{self.name} is {self.estimate.value:.3g} ({interval}: {low} to {high}), {limit} {self.bound:g} is allowed"
        )

    def describe(self) -> dict[str, Any]:
        """Return the check for JSON, with a sentence."""
        return {
            "guard": self.key,
            "verdict": self.verdict,
            "bound": self.bound,
            "requests": self.requests,
            **self.estimate.describe(),
            "text": str(self),
        }


def _format_end(end: float) -> str:
    return "unknown" if math.isinf(end) else f"{end:.3g}"


class GuardVerdict(NamedTuple):
    """What a guard says about a stage, with the sentence that says why."""

    outcome: Literal["tripped", "passed", "undecided"]
    reason: str
    checks: list[GuardCheck]


class StageStatistics(NamedTuple):
    """The statistics that a guard looks at. None: the stage has nothing of the kind."""

    fidelity: FidelityStatistics | None  # of the roll-out's shadows since its start
    baseline: ArmStatistics | None  # requests that stayed, since the stage's start
    canary: ArmStatistics | None  # requests that the candidate served, since the stage's start


def judge(settings: GuardSettings, stage: StageStatistics) -> GuardVerdict:
    """Return the verdict on a stage."""
    checks = [*_check_fidelity(settings, stage.fidelity), *_check_arms(settings, stage.baseline, stage.canary)]
    by_verdict = {verdict: [c for c in checks if c.verdict == verdict] for verdict in ("tripped", "undecided")}
    if tripped := by_verdict["tripped"]:
        return GuardVerdict("tripped", "; ".join(map(str, tripped)), checks)
    seen = _count_requests(stage)
    if seen < settings.min_requests:
        return GuardVerdict("undecided", f"{seen} of {settings.min_requests} requests have been seen", checks)
    if undecided := by_verdict["undecided"]:
        return GuardVerdict("undecided", "; ".join(map(str, undecided)), checks)
    return GuardVerdict("passed", "every figure keeps its bound", checks)


def _count_requests(stage: StageStatistics) -> int:
    """Return the number of requests that tell about the candidate: those it served, or without any, shadowed ones."""
    if stage.canary is not None:
        return stage.canary.totals["requests"]
    return stage.fidelity.totals["compared"] if stage.fidelity is not None else 0


def _check_fidelity(settings: GuardSettings, fidelity: FidelityStatistics | None) -> Iterator[GuardCheck]:
    if fidelity is None:
        return
    compared, confidence = fidelity.totals["compared"], GUARD_CONFIDENCE
    if settings.kl_mean is not None:
        yield GuardCheck("kl_mean", "the mean KL divergence", fidelity.mean_kl(confidence), settings.kl_mean, compared)
    if settings.kl_p99 is not None:
        yield GuardCheck(
            "kl_p99",
            "the 99th percentile of the KL divergence",
            fidelity.kl_quantile(0.99, confidence),
            settings.kl_p99,
            compared,
        )
    if settings.top1 is not None:
        name = "the share of equal likeliest tokens"
        yield GuardCheck("top1", name, fidelity.top1(confidence), settings.top1, compared, smaller_is_better=False)
    if settings.errors is not None and fidelity.totals["requests"]:
        name, requests = "the share of comparisons in which the candidate failed", fidelity.totals["requests"]
        yield GuardCheck("errors", name, fidelity.errors(confidence), settings.errors, requests)


def _check_arms(
    settings: GuardSettings, baseline: ArmStatistics | None, canary: ArmStatistics | None
) -> Iterator[GuardCheck]:
    if canary is None:
        return
    if settings.errors is not None:
        yield GuardCheck(
            "errors",
            "the share of failed requests",
            canary.errors(GUARD_CONFIDENCE),
            _raise_by_baseline(settings.errors, baseline),
            canary.totals["requests"],
            conversations=canary.num_conversations,
            failures=canary.num_failed_conversations,
        )
    if baseline is None:
        return
    for key, name, bound, ours, theirs in (
        (
            "ttft_p95_ratio",
            "the 95th percentile of the time to the first token, relative to the baseline,",
            settings.ttft_p95_ratio,
            canary.first_token_seconds,
            baseline.first_token_seconds,
        ),
        (
            "itl_p95_ratio",
            "the 95th percentile of the time between tokens, relative to the baseline,",
            settings.itl_p95_ratio,
            canary.inter_token_seconds,
            baseline.inter_token_seconds,
        ),
    ):
        requests = min(len(ours), len(theirs))
        if bound is not None and _is_measured(key, canary, baseline):
            known = requests >= LEAST_REQUESTS
            independent = canary.num_conversations, baseline.num_conversations
            ratio = (
                quantile_ratio(ours, theirs, 0.95, GUARD_CONFIDENCE, independent)
                if known
                else Estimate(math.nan, 0.0, math.inf)
            )
            yield GuardCheck(key, name, ratio, bound, requests, conversations=min(independent))


def _raise_by_baseline(bound: float, baseline: ArmStatistics | None) -> float:
    """Return the bound of errors, or the share of errors of the baseline if that is higher: both suffer then."""
    if baseline is None or baseline.num_conversations < LEAST_REQUESTS:
        return bound
    return max(bound, baseline.errors(GUARD_CONFIDENCE).value)


def _is_measured(key: str, canary: ArmStatistics, baseline: ArmStatistics) -> bool:
    """Return whether a time can be compared: that between tokens cannot while all answers have only one token."""
    if key != "itl_p95_ratio":
        return True
    few = min(canary.totals["requests"], baseline.totals["requests"]) < LEAST_REQUESTS
    return few or bool(len(canary.inter_token_seconds) or len(baseline.inter_token_seconds))
