"""The first dashboard to look at: what is asked, how fast it is answered, and whether something is short."""

from __future__ import annotations

from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.families import MetricFamily
from tools.dashboards.panels import (
    NUMBER,
    REQUESTS_A_SECOND,
    SECONDS,
    SHARE,
    TOKENS_A_SECOND,
    dashboard,
    lines,
    number,
)
from tools.dashboards.promql import each, highest, now, quantile, rate
from tools.dashboards.shares import error_share, hit_rate


def overview() -> Dashboard:
    return dashboard(
        "overview",
        "overview",
        "Requests, tokens, latency and memory of all strategies together.",
        {
            "Now": _now(),
            "Traffic": _traffic(),
            "Latency": _latency(),
            "Cache and trouble": _cache_and_trouble(),
        },
    )


def _now() -> list[Stat]:
    return [
        number("Requests", REQUESTS_A_SECOND, rate(f.REQUESTS)),
        number("Tokens", TOKENS_A_SECOND, rate(f.GENERATION_TOKENS)),
        number("First token, p95", SECONDS, quantile(0.95, f.FIRST_TOKEN_TIME)),
        number("Running", NUMBER, now(f.RUNNING)),
        number("Waiting", NUMBER, now(f.WAITING)),
        number("Hit rate", SHARE, hit_rate()),
        number("Fullest strategy", SHARE, highest(f.KV_USAGE), bad_from=0.95),
        number("Errors", SHARE, error_share(), bad_from=0.01),
    ]


def _traffic() -> list[Timeseries]:
    return [
        lines(
            "Requests, by outcome",
            REQUESTS_A_SECOND,
            {each(f.OUTCOME): rate(f.REQUESTS, f.OUTCOME)},
            stacked=True,
        ),
        lines(
            "Tokens",
            TOKENS_A_SECOND,
            {
                "generated": rate(f.GENERATION_TOKENS),
                "of prompts": rate(f.PROMPT_TOKENS),
                "of these, cached": rate(f.CACHED_TOKENS),
            },
        ),
        lines(
            "Running and waiting",
            NUMBER,
            {"running": now(f.RUNNING), f"waiting: {each(f.WAIT)}": now(f.WAITING, f.WAIT)},
            stacked=True,
        ),
    ]


def _latency() -> list[Timeseries]:
    return [
        lines("Time to first token", SECONDS, quantiles(f.FIRST_TOKEN_TIME)),
        lines("Time between tokens", SECONDS, quantiles(f.INTER_TOKEN_LATENCY)),
        lines("From arrival to the end", SECONDS, quantiles(f.E2E_LATENCY)),
    ]


def _cache_and_trouble() -> list[Timeseries]:
    return [
        lines("Hit rate", SHARE, {"all": hit_rate()}, width=6),
        lines("KV memory used of the limit", SHARE, {each(f.STRATEGY): highest(f.KV_USAGE, f.STRATEGY)}, width=6),
        lines(
            "HTTP responses, by status",
            REQUESTS_A_SECOND,
            {each(f.CODE): f"{rate(f.RESPONSES, f.CODE)} > 0"},
            stacked=True,
            width=6,
        ),
        lines(
            "Errors",
            REQUESTS_A_SECOND,
            {
                "requests that ended so": rate(f.REQUESTS, where={f.OUTCOME: "error"}),
                "exceptions in a strategy": rate(f.FAILURES),
            },
            width=6,
        ),
    ]


def quantiles(family: MetricFamily[Histogram]) -> dict[str, str]:
    """The middle, and the slow ones."""
    return {f"p{100 * share:.0f}": quantile(share, family) for share in (0.5, 0.95, 0.99)}
