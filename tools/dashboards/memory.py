"""Memory and hit rate: which strategy holds what, what was found in it, and why no more."""

from __future__ import annotations

from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.families import MetricFamily
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
        "Where KV memory is, what prompts found in it, and what had to make room.",
        {
            "Found": [
                make_timeseries("Hit rate", SHARE, {STRATEGY_LEGEND: hit_rate(f.STRATEGY)}),
                make_timeseries(
                    "Looked up and found",
                    TOKENS_A_SECOND,
                    {"looked up": rate(f.PREFIX_QUERIES), "found": rate(f.PREFIX_HITS)},
                ),
                make_timeseries(
                    "Not found, by reason",
                    TOKENS_A_SECOND,
                    {make_legend(f.MISS_REASON): rate(f.PREFIX_MISSES, f.MISS_REASON)},
                    stacked=True,
                    note="cold: never there; short: does not fill a block; evicted: had to make room; window: the "
                    "strategy forgets; busy: in use and not shared; salt: there under another; bypass: not wanted.",
                ),
            ],
            "Held": [
                make_timeseries(
                    "All of it", BYTES, {make_legend(f.POOL_STATE): sum_by(f.KV_POOL, f.POOL_STATE)}, stacked=True
                ),
                make_timeseries(
                    "Held, by strategy", BYTES, {STRATEGY_LEGEND: sum_by(f.KV_BYTES, f.STRATEGY)}, stacked=True
                ),
                make_timeseries(
                    "Held, by state", BYTES, {make_legend(f.KV_STATE): sum_by(f.KV_BYTES, f.KV_STATE)}, stacked=True
                ),
                make_timeseries(
                    "KV memory used of the limit", SHARE, {STRATEGY_LEGEND: max_by(f.KV_USAGE, f.STRATEGY)}
                ),
                make_timeseries(
                    "Wasted of what is held",
                    SHARE,
                    {STRATEGY_LEGEND: ratio(_select_state("wasted"), sum_by(f.KV_BYTES, f.STRATEGY))},
                ),
                make_timeseries("Idle", BYTES, {STRATEGY_LEGEND: _select_state("idle")}),
                make_timeseries(
                    "Limits and floors",
                    BYTES,
                    {
                        f"{STRATEGY_LEGEND} limit": sum_by(f.KV_LIMIT, f.STRATEGY),
                        f"{STRATEGY_LEGEND} floor": sum_by(f.KV_FLOOR, f.STRATEGY),
                    },
                ),
                make_timeseries(
                    "Blocks, by state", NUMBER, {make_legend(f.BLOCK_STATE): sum_by(f.KV_BLOCKS, f.BLOCK_STATE)}
                ),
                make_timeseries("Copies on write", TIMES_A_SECOND, {STRATEGY_LEGEND: rate(f.KV_COPIES, f.STRATEGY)}),
            ],
            "Kept, and made room": [
                make_timeseries("Evicted", BYTES_A_SECOND, {STRATEGY_LEGEND: rate(f.KV_EVICTED, f.STRATEGY)}, width=6),
                _make_age_panel("Age of evicted blocks", f.BLOCK_LIFETIME),
                _make_age_panel("Idle before they were evicted", f.BLOCK_IDLE),
                _make_age_panel("Idle before they were used again", f.BLOCK_REUSE_GAP),
            ],
        },
    )


def _select_state(state: str) -> str:
    return sum_by(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: state})


def _make_age_panel(title: str, family: MetricFamily[Histogram]) -> Timeseries:
    return make_timeseries(f"{title}, median", SECONDS, {STRATEGY_LEGEND: quantile(0.5, family, f.STRATEGY)}, width=6)
