"""The dashboard to look at first: traffic, latency, cache hits, memory and errors."""

from __future__ import annotations

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.metric_family import MetricFamily
from tools.dashboards.panels import (
    NUMBER,
    REQUESTS_A_SECOND,
    SECONDS,
    SHARE,
    TOKENS_A_SECOND,
    make_dashboard,
    make_stat,
    make_timeseries,
)
from tools.dashboards.promql import make_legend, max_by, quantile, rate, sum_by
from tools.dashboards.shares import error_share, hit_rate


def build_overview_dashboard() -> Dashboard:
    return make_dashboard(
        "overview",
        "overview",
        "Requests, tokens, latency and memory of all strategies together.",
        {
            "Now": _make_now_panels(),
            "Traffic": _make_traffic_panels(),
            "Latency": _make_latency_panels(),
            "Cache and errors": _make_health_panels(),
        },
    )


def _make_now_panels() -> list[Stat]:
    return [
        make_stat("Requests", REQUESTS_A_SECOND, rate(f.REQUESTS)),
        make_stat("Generated tokens", TOKENS_A_SECOND, rate(f.GENERATION_TOKENS)),
        make_stat("TTFT, p95", SECONDS, quantile(0.95, f.FIRST_TOKEN_TIME)),
        make_stat("Running requests", NUMBER, sum_by(f.RUNNING)),
        make_stat("Waiting requests", NUMBER, sum_by(f.WAITING)),
        make_stat("Prefix hit rate", SHARE, hit_rate()),
        make_stat("Max KV usage", SHARE, max_by(f.KV_USAGE), red_from=0.95),
        make_stat("Error rate", SHARE, error_share(), red_from=0.01),
    ]


def _make_traffic_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "Finished requests by outcome",
            REQUESTS_A_SECOND,
            {make_legend(f.OUTCOME): rate(f.REQUESTS, f.OUTCOME)},
            stacked=True,
        ),
        make_timeseries(
            "Tokens",
            TOKENS_A_SECOND,
            {
                "generated": rate(f.GENERATION_TOKENS),
                "prompt": rate(f.PROMPT_TOKENS),
                "prompt, cached": rate(f.CACHED_TOKENS),
            },
        ),
        make_timeseries(
            "Running and waiting requests",
            NUMBER,
            {"running": sum_by(f.RUNNING), f"waiting: {make_legend(f.WAIT_REASON)}": sum_by(f.WAITING, f.WAIT_REASON)},
            stacked=True,
        ),
    ]


def _make_latency_panels() -> list[Timeseries]:
    return [
        make_timeseries("Time to first token", SECONDS, make_quantile_queries(f.FIRST_TOKEN_TIME)),
        make_timeseries("Inter-token latency", SECONDS, make_quantile_queries(f.INTER_TOKEN_LATENCY)),
        make_timeseries("End-to-end latency", SECONDS, make_quantile_queries(f.E2E_LATENCY)),
    ]


def _make_health_panels() -> list[Timeseries]:
    return [
        make_timeseries("Prefix cache hit rate", SHARE, {"all": hit_rate()}, width=6),
        make_timeseries(
            "KV cache usage, share of the limit",
            SHARE,
            {make_legend(f.STRATEGY): max_by(f.KV_USAGE, f.STRATEGY)},
            width=6,
        ),
        make_timeseries(
            "HTTP responses by status",
            REQUESTS_A_SECOND,
            {make_legend(f.CODE): f"{rate(f.RESPONSES, f.CODE)} > 0"},
            stacked=True,
            width=6,
        ),
        make_timeseries(
            "Errors",
            REQUESTS_A_SECOND,
            {
                "failed requests": rate(f.REQUESTS, where={f.OUTCOME: "error"}),
                "faults of strategies": rate(f.FAILURES),
            },
            width=6,
        ),
    ]


def make_quantile_queries(family: MetricFamily[Histogram]) -> dict[str, str]:
    """Return the queries for the 50th, 95th and 99th percentile by their legends."""
    return {f"p{100 * share:.0f}": quantile(share, family) for share in (0.5, 0.95, 0.99)}
