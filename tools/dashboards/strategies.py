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
    make_dashboard,
    make_info_table,
    make_timeseries,
)
from tools.dashboards.promql import make_legend, max_by, mean, quantile, rate, ratio, ratio_to_all, sum_by
from tools.dashboards.shares import hit_rate

STRATEGY_LEGEND = make_legend(f.STRATEGY)
ACCEPTED, DRAFTS = rate(f.ACCEPTED_TOKENS, f.STRATEGY), rate(f.DRAFTS, f.STRATEGY)


def build_strategies_dashboard() -> Dashboard:
    return make_dashboard(
        "strategies",
        "strategies side by side",
        "Which is fast, which finds what was computed, which needs how much memory?",
        {
            "Latency": [
                make_p95_panel("Time to first token", f.FIRST_TOKEN_TIME),
                make_p95_panel("Time between tokens", f.INTER_TOKEN_LATENCY),
                make_timeseries(
                    "Mean time between tokens", SECONDS, {STRATEGY_LEGEND: mean(f.TIME_PER_TOKEN, f.STRATEGY)}, width=6
                ),
                make_p95_panel("From arrival to the end", f.E2E_LATENCY),
                make_p95_panel("In the queue", f.QUEUE_TIME, width=8),
                make_p95_panel("Prefill", f.PREFILL_TIME, width=8),
                make_p95_panel("Decode", f.DECODE_TIME, width=8),
            ],
            "Throughput": [
                make_rate_panel("Requests", REQUESTS_A_SECOND, f.REQUESTS, width=6),
                make_rate_panel("Choices that took over a prompt", REQUESTS_A_SECOND, f.FORKS, width=6),
                make_rate_panel("Tokens generated", TOKENS_A_SECOND, f.GENERATION_TOKENS, width=6),
                make_rate_panel("Tokens of prompts", TOKENS_A_SECOND, f.PROMPT_TOKENS, width=6),
                make_timeseries("Running", NUMBER, {STRATEGY_LEGEND: sum_by(f.RUNNING, f.STRATEGY)}, width=6),
                make_timeseries("Waiting", NUMBER, {STRATEGY_LEGEND: sum_by(f.WAITING, f.STRATEGY)}, width=6),
                make_timeseries(
                    "Tokens of a prompt, mean",
                    NUMBER,
                    {STRATEGY_LEGEND: mean(f.REQUEST_PROMPT_TOKENS, f.STRATEGY)},
                    width=6,
                ),
                make_timeseries(
                    "Tokens of an answer, mean",
                    NUMBER,
                    {STRATEGY_LEGEND: mean(f.REQUEST_GENERATION_TOKENS, f.STRATEGY)},
                    width=6,
                ),
            ],
            "Cache and memory": [
                make_timeseries("Hit rate", SHARE, {STRATEGY_LEGEND: hit_rate(f.STRATEGY)}),
                make_timeseries(
                    "KV memory used",
                    BYTES,
                    {STRATEGY_LEGEND: sum_by(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: "used"})},
                ),
                make_timeseries(
                    "KV memory used of the limit", SHARE, {STRATEGY_LEGEND: max_by(f.KV_USAGE, f.STRATEGY)}
                ),
            ],
            "Speculation": [
                make_timeseries(
                    "Guesses of a draft that came true, mean",
                    NUMBER,
                    {STRATEGY_LEGEND: ratio(ACCEPTED, DRAFTS)},
                    width=6,
                ),
                make_timeseries(
                    "Guesses that came true",
                    SHARE,
                    {STRATEGY_LEGEND: ratio(ACCEPTED, rate(f.DRAFT_TOKENS, f.STRATEGY))},
                    width=6,
                ),
                make_rate_panel("Guesses verified", TOKENS_A_SECOND, f.DRAFT_TOKENS, width=6),
                make_timeseries(
                    "Drafts that came true up to a position",
                    SHARE,
                    {make_legend(f.POSITION): ratio_to_all(rate(f.ACCEPTED_PER_POSITION, f.POSITION), rate(f.DRAFTS))},
                    width=6,
                ),
            ],
            "Trouble": [
                make_rate_panel("Preemptions", TIMES_A_SECOND, f.PREEMPTIONS),
                make_rate_panel("Exceptions in its code", TIMES_A_SECOND, f.FAILURES),
                make_timeseries(
                    "Requests that ended with an error",
                    REQUESTS_A_SECOND,
                    {STRATEGY_LEGEND: rate(f.REQUESTS, f.STRATEGY, where={f.OUTCOME: "error"})},
                ),
            ],
            "Who is who": [make_info_table("Strategies", f.STRATEGIES, width=24, height=5)],
        },
    )


def make_rate_panel(title: str, unit: str, family: MetricFamily[Any], width: int = 8) -> Timeseries:
    return make_timeseries(title, unit, {STRATEGY_LEGEND: rate(family, f.STRATEGY)}, width=width)


def make_p95_panel(title: str, family: MetricFamily[Histogram], width: int = 6) -> Timeseries:
    """Make a panel of the time that one request in twenty exceeds."""
    return make_timeseries(f"{title}, p95", SECONDS, {STRATEGY_LEGEND: quantile(0.95, family, f.STRATEGY)}, width=width)
