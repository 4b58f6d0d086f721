"""The dashboard of KV memory and prefix caching: hit rates, memory by strategy and state, evictions."""

from __future__ import annotations

from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.metric_family import MetricFamily
from tools.dashboards.panels import (
    BYTES,
    BYTES_A_SECOND,
    NUMBER,
    SECONDS,
    SHARE,
    TIMES_A_SECOND,
    TOKENS_A_SECOND,
    make_dashboard,
    make_timeseries,
)
from tools.dashboards.promql import make_legend, max_by, quantile, rate, ratio, sum_by
from tools.dashboards.shares import hit_rate

STRATEGY_LEGEND = make_legend(f.STRATEGY)


def build_memory_dashboard() -> Dashboard:
    return make_dashboard(
        "memory",
        "memory and hit rate",
        "Prefix cache hits and misses, KV memory by strategy and state, and evictions.",
        {
            "Prefix cache": _make_prefix_panels(),
            "KV memory": _make_memory_panels(),
            "Eviction": _make_eviction_panels(),
        },
    )


def _make_prefix_panels() -> list[Timeseries]:
    return [
        make_timeseries("Prefix cache hit rate", SHARE, {STRATEGY_LEGEND: hit_rate(f.STRATEGY)}),
        make_timeseries(
            "Prefix cache queries and hits",
            TOKENS_A_SECOND,
            {"queries": rate(f.PREFIX_QUERIES), "hits": rate(f.PREFIX_HITS)},
        ),
        make_timeseries(
            "Prefix cache misses by reason",
            TOKENS_A_SECOND,
            {make_legend(f.MISS_REASON): rate(f.PREFIX_MISSES, f.MISS_REASON)},
            stacked=True,
            note="cold: not cached before; short: less than a block; evicted: cached before, but evicted; "
            "window: the strategy's window cannot be reused; busy: in use, and the strategy does not share; "
            "salt: cached only with another salt; bypass: not looked up, by setting or request.",
        ),
    ]


def _make_memory_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "KV memory of the device",
            BYTES,
            {make_legend(f.POOL_STATE): sum_by(f.KV_POOL, f.POOL_STATE)},
            stacked=True,
        ),
        make_timeseries(
            "KV memory by strategy", BYTES, {STRATEGY_LEGEND: sum_by(f.KV_BYTES, f.STRATEGY)}, stacked=True
        ),
        make_timeseries(
            "KV memory by state",
            BYTES,
            {make_legend(f.KV_STATE): sum_by(f.KV_BYTES, f.KV_STATE)},
            stacked=True,
        ),
        make_timeseries("KV cache usage, share of the limit", SHARE, {STRATEGY_LEGEND: max_by(f.KV_USAGE, f.STRATEGY)}),
        make_timeseries(
            "Wasted share of KV memory",
            SHARE,
            {STRATEGY_LEGEND: ratio(_select_state("wasted"), sum_by(f.KV_BYTES, f.STRATEGY))},
        ),
        make_timeseries("Idle KV memory", BYTES, {STRATEGY_LEGEND: _select_state("idle")}),
        make_timeseries(
            "Memory limits and floors",
            BYTES,
            {
                f"{STRATEGY_LEGEND} limit": sum_by(f.KV_LIMIT, f.STRATEGY),
                f"{STRATEGY_LEGEND} floor": sum_by(f.KV_FLOOR, f.STRATEGY),
            },
        ),
        make_timeseries("Blocks by state", NUMBER, {make_legend(f.BLOCK_STATE): sum_by(f.KV_BLOCKS, f.BLOCK_STATE)}),
        make_timeseries("Copy-on-write", TIMES_A_SECOND, {STRATEGY_LEGEND: rate(f.KV_COPIES, f.STRATEGY)}),
    ]


def _make_eviction_panels() -> list[Timeseries]:
    return [
        make_timeseries("Evicted bytes", BYTES_A_SECOND, {STRATEGY_LEGEND: rate(f.KV_EVICTED, f.STRATEGY)}, width=6),
        _make_age_panel("Lifetime of evicted blocks", f.BLOCK_LIFETIME),
        _make_age_panel("Idle time before eviction", f.BLOCK_IDLE),
        _make_age_panel("Idle time before reuse", f.BLOCK_REUSE_GAP),
    ]


def _select_state(state: str) -> str:
    return sum_by(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: state})


def _make_age_panel(title: str, family: MetricFamily[Histogram]) -> Timeseries:
    return make_timeseries(f"{title}, median", SECONDS, {STRATEGY_LEGEND: quantile(0.5, family, f.STRATEGY)}, width=6)
