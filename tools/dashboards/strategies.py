"""The dashboard that compares strategy instances: every panel has one line per instance."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.metric_family import MetricFamily
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
from tools.dashboards.promql import make_legend, max_by, mean, product, quantile, rate, ratio, ratio_to_all, sum_by
from tools.dashboards.shares import hit_rate

STRATEGY_LEGEND = make_legend(f.STRATEGY)
ACCEPTED, DRAFTS = rate(f.ACCEPTED_TOKENS, f.STRATEGY), rate(f.DRAFTS, f.STRATEGY)
KEPT = sum_by(f.KV_TOKENS, f.STRATEGY, where={f.KV_TOKEN_STATE: "kept"})
BUDGETS = product(sum_by(f.RUNNING, f.STRATEGY), max_by(f.KV_BUDGET, f.STRATEGY))


def build_strategies_dashboard() -> Dashboard:
    return make_dashboard(
        "strategies",
        "strategies",
        "Strategy instances compared: latency, throughput, hit rate, memory, budgets, speculative decoding and errors.",
        {
            "Latency": _make_latency_panels(),
            "Throughput": _make_throughput_panels(),
            "Cache and memory": _make_memory_panels(),
            "Budgets and compactions": _make_budget_panels(),
            "Speculative decoding": _make_speculation_panels(),
            "Preemptions and errors": _make_error_panels(),
            "Instances": [make_info_table("Strategy instances", f.STRATEGIES, width=24, height=5)],
        },
    )


def _make_latency_panels() -> list[Timeseries]:
    return [
        make_p95_panel("Time to first token", f.FIRST_TOKEN_TIME),
        make_p95_panel("Inter-token latency", f.INTER_TOKEN_LATENCY),
        make_timeseries(
            "Time per output token, mean",
            SECONDS,
            {STRATEGY_LEGEND: mean(f.TIME_PER_TOKEN, f.STRATEGY)},
            width=6,
        ),
        make_p95_panel("End-to-end latency", f.E2E_LATENCY),
        make_p95_panel("Queue time", f.QUEUE_TIME, width=8),
        make_p95_panel("Prefill time", f.PREFILL_TIME, width=8),
        make_p95_panel("Decode time", f.DECODE_TIME, width=8),
    ]


def _make_throughput_panels() -> list[Timeseries]:
    return [
        make_rate_panel("Requests", REQUESTS_A_SECOND, f.REQUESTS, width=6),
        make_rate_panel("Forked sequences (n > 1)", REQUESTS_A_SECOND, f.FORKS, width=6),
        make_rate_panel("Generated tokens", TOKENS_A_SECOND, f.GENERATION_TOKENS, width=6),
        make_rate_panel("Prompt tokens", TOKENS_A_SECOND, f.PROMPT_TOKENS, width=6),
        make_timeseries("Running requests", NUMBER, {STRATEGY_LEGEND: sum_by(f.RUNNING, f.STRATEGY)}, width=6),
        make_timeseries("Waiting requests", NUMBER, {STRATEGY_LEGEND: sum_by(f.WAITING, f.STRATEGY)}, width=6),
        make_timeseries(
            "Prompt tokens per request, mean",
            NUMBER,
            {STRATEGY_LEGEND: mean(f.REQUEST_PROMPT_TOKENS, f.STRATEGY)},
            width=6,
        ),
        make_timeseries(
            "Generated tokens per request, mean",
            NUMBER,
            {STRATEGY_LEGEND: mean(f.REQUEST_GENERATION_TOKENS, f.STRATEGY)},
            width=6,
        ),
    ]


def _make_memory_panels() -> list[Timeseries]:
    return [
        make_timeseries("Prefix cache hit rate", SHARE, {STRATEGY_LEGEND: hit_rate(f.STRATEGY)}),
        make_timeseries(
            "KV memory in use",
            BYTES,
            {STRATEGY_LEGEND: sum_by(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: "used"})},
        ),
        make_timeseries("KV cache usage, share of the limit", SHARE, {STRATEGY_LEGEND: max_by(f.KV_USAGE, f.STRATEGY)}),
        make_timeseries(
            "Kept and dropped tokens",
            NUMBER,
            {make_legend(f.STRATEGY, f.KV_TOKEN_STATE): sum_by(f.KV_TOKENS, f.STRATEGY, f.KV_TOKEN_STATE)},
            width=12,
        ),
        make_rate_panel("Dropped tokens of requests that left", TOKENS_A_SECOND, f.KV_DROPPED, width=12),
    ]


def _make_budget_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "Kept tokens, and the budgets of running sequences",
            NUMBER,
            {f"{STRATEGY_LEGEND} kept": KEPT, f"{STRATEGY_LEGEND} budgets": BUDGETS},
            note="A budget is that of a text of max_seq_len tokens. Until the next compaction more are kept.",
            width=12,
        ),
        make_timeseries(
            "Time of a compaction, p50 and p99",
            SECONDS,
            {
                f"{STRATEGY_LEGEND} p50": quantile(0.5, f.KV_COMPACTION_SECONDS, f.STRATEGY),
                f"{STRATEGY_LEGEND} p99": quantile(0.99, f.KV_COMPACTION_SECONDS, f.STRATEGY),
            },
            width=12,
        ),
        make_rate_panel("Compactions", TIMES_A_SECOND, f.KV_COMPACTIONS),
        make_rate_panel("Tokens dropped by compactions", TOKENS_A_SECOND, f.KV_COMPACTED),
        make_timeseries(
            "Share of the steps' time that compactions take",
            SHARE,
            {
                STRATEGY_LEGEND: ratio_to_all(
                    rate(f.KV_COMPACTION_SECONDS, f.STRATEGY, part="_sum"), rate(f.STEP_SECONDS, part="_sum")
                )
            },
        ),
    ]


def _make_speculation_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "Accepted tokens per draft, mean",
            NUMBER,
            {STRATEGY_LEGEND: ratio(ACCEPTED, DRAFTS)},
            width=6,
        ),
        make_timeseries(
            "Acceptance rate of draft tokens",
            SHARE,
            {STRATEGY_LEGEND: ratio(ACCEPTED, rate(f.DRAFT_TOKENS, f.STRATEGY))},
            width=6,
        ),
        make_rate_panel("Draft tokens", TOKENS_A_SECOND, f.DRAFT_TOKENS, width=6),
        make_timeseries(
            "Acceptance rate by position",
            SHARE,
            {make_legend(f.POSITION): ratio_to_all(rate(f.ACCEPTED_PER_POSITION, f.POSITION), rate(f.DRAFTS))},
            width=6,
        ),
    ]


def _make_error_panels() -> list[Timeseries]:
    return [
        make_rate_panel("Preemptions", TIMES_A_SECOND, f.PREEMPTIONS, width=6),
        make_rate_panel("Faults of strategies", TIMES_A_SECOND, f.FAILURES, width=6),
        make_timeseries(
            "In quarantine or disabled after faults",
            NUMBER,
            {
                f"{STRATEGY_LEGEND} in quarantine": max_by(f.QUARANTINED, f.STRATEGY),
                f"{STRATEGY_LEGEND} disabled": max_by(f.DISABLED, f.STRATEGY),
            },
            width=6,
        ),
        make_timeseries(
            "Failed requests",
            REQUESTS_A_SECOND,
            {STRATEGY_LEGEND: rate(f.REQUESTS, f.STRATEGY, where={f.OUTCOME: "error"})},
            width=6,
        ),
        make_timeseries(
            "Requests that fallbacks served",
            REQUESTS_A_SECOND,
            {make_legend(f.STRATEGY, f.FALLBACK): rate(f.FALLBACK_REQUESTS, f.STRATEGY, f.FALLBACK)},
            width=6,
        ),
    ]


def make_rate_panel(title: str, unit: str, family: MetricFamily[Any], width: int = 8) -> Timeseries:
    return make_timeseries(title, unit, {STRATEGY_LEGEND: rate(family, f.STRATEGY)}, width=width)


def make_p95_panel(title: str, family: MetricFamily[Histogram], width: int = 6) -> Timeseries:
    """Make a panel of a histogram's 95th percentile, by strategy."""
    return make_timeseries(f"{title}, p95", SECONDS, {STRATEGY_LEGEND: quantile(0.95, family, f.STRATEGY)}, width=width)
