"""Strategies side by side: every panel has a line for each."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.families import MetricFamily
from tools.dashboards.panels import (
    BYTES,
    NUMBER,
    REQUESTS_A_SECOND,
    SECONDS,
    SHARE,
    TIMES_A_SECOND,
    TOKENS_A_SECOND,
    dashboard,
    facts,
    lines,
)
from tools.dashboards.promql import each, highest, mean, now, quantile, rate, ratio, ratio_to_all
from tools.dashboards.shares import hit_rate

BY = each(f.STRATEGY)
ACCEPTED, DRAFTS = rate(f.ACCEPTED_TOKENS, f.STRATEGY), rate(f.DRAFTS, f.STRATEGY)


def strategies() -> Dashboard:
    return dashboard(
        "strategies",
        "strategies side by side",
        "Which is fast, which finds what was computed, which needs how much memory?",
        {
            "Latency": [
                slow("Time to first token", f.FIRST_TOKEN_TIME),
                slow("Time between tokens", f.INTER_TOKEN_LATENCY),
                lines("Mean time between tokens", SECONDS, {BY: mean(f.TIME_PER_TOKEN, f.STRATEGY)}, width=6),
                slow("From arrival to the end", f.E2E_LATENCY),
                slow("In the queue", f.QUEUE_TIME, width=8),
                slow("Prefill", f.PREFILL_TIME, width=8),
                slow("Decode", f.DECODE_TIME, width=8),
            ],
            "Throughput": [
                rates("Requests", REQUESTS_A_SECOND, f.REQUESTS, width=6),
                rates("Choices that took over a prompt", REQUESTS_A_SECOND, f.FORKS, width=6),
                rates("Tokens generated", TOKENS_A_SECOND, f.GENERATION_TOKENS, width=6),
                rates("Tokens of prompts", TOKENS_A_SECOND, f.PROMPT_TOKENS, width=6),
                lines("Running", NUMBER, {BY: now(f.RUNNING, f.STRATEGY)}, width=6),
                lines("Waiting", NUMBER, {BY: now(f.WAITING, f.STRATEGY)}, width=6),
                lines("Tokens of a prompt, mean", NUMBER, {BY: mean(f.REQUEST_PROMPT_TOKENS, f.STRATEGY)}, width=6),
                lines(
                    "Tokens of an answer, mean", NUMBER, {BY: mean(f.REQUEST_GENERATION_TOKENS, f.STRATEGY)}, width=6
                ),
            ],
            "Cache and memory": [
                lines("Hit rate", SHARE, {BY: hit_rate(f.STRATEGY)}),
                lines("KV memory used", BYTES, {BY: now(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: "used"})}),
                lines("KV memory used of the limit", SHARE, {BY: highest(f.KV_USAGE, f.STRATEGY)}),
            ],
            "Speculation": [
                lines("Guesses of a draft that came true, mean", NUMBER, {BY: ratio(ACCEPTED, DRAFTS)}, width=6),
                lines(
                    "Guesses that came true", SHARE, {BY: ratio(ACCEPTED, rate(f.DRAFT_TOKENS, f.STRATEGY))}, width=6
                ),
                rates("Guesses verified", TOKENS_A_SECOND, f.DRAFT_TOKENS, width=6),
                lines(
                    "Drafts that came true up to a position",
                    SHARE,
                    {each(f.POSITION): ratio_to_all(rate(f.ACCEPTED_PER_POSITION, f.POSITION), rate(f.DRAFTS))},
                    width=6,
                ),
            ],
            "Trouble": [
                rates("Preemptions", TIMES_A_SECOND, f.PREEMPTIONS),
                rates("Exceptions in its code", TIMES_A_SECOND, f.FAILURES),
                lines(
                    "Requests that ended with an error",
                    REQUESTS_A_SECOND,
                    {BY: rate(f.REQUESTS, f.STRATEGY, where={f.OUTCOME: "error"})},
                ),
            ],
            "Who is who": [facts("Strategies", f.STRATEGIES, width=24, height=5)],
        },
    )


def rates(title: str, unit: str, family: MetricFamily[Any], width: int = 8) -> Timeseries:
    return lines(title, unit, {BY: rate(family, f.STRATEGY)}, width=width)


def slow(title: str, family: MetricFamily[Histogram], width: int = 6) -> Timeseries:
    """How long it takes with one in twenty, or longer."""
    return lines(f"{title}, p95", SECONDS, {BY: quantile(0.95, family, f.STRATEGY)}, width=width)
