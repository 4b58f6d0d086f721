"""Memory and hit rate: who holds what, what was found in it, and why no more."""

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
    dashboard,
    lines,
)
from tools.dashboards.promql import each, highest, now, quantile, rate, ratio
from tools.dashboards.shares import hit_rate

BY = each(f.STRATEGY)


def memory() -> Dashboard:
    return dashboard(
        "memory",
        "memory and hit rate",
        "Where KV memory is, what prompts found in it, and what had to make room.",
        {
            "Found": [
                lines("Hit rate", SHARE, {BY: hit_rate(f.STRATEGY)}),
                lines(
                    "Looked up and found",
                    TOKENS_A_SECOND,
                    {"looked up": rate(f.PREFIX_QUERIES), "found": rate(f.PREFIX_HITS)},
                ),
                lines(
                    "Not found, by reason",
                    TOKENS_A_SECOND,
                    {each(f.MISS): rate(f.PREFIX_MISSES, f.MISS)},
                    stacked=True,
                    note="cold: never there; short: does not fill a block; evicted: had to make room; window: the "
                    "strategy forgets; busy: in use and not shared; salt: there under another; bypass: not wanted.",
                ),
            ],
            "Held": [
                lines("All of it", BYTES, {each(f.POOL_STATE): now(f.KV_POOL, f.POOL_STATE)}, stacked=True),
                lines("Held, by strategy", BYTES, {BY: now(f.KV_BYTES, f.STRATEGY)}, stacked=True),
                lines("Held, by state", BYTES, {each(f.KV_STATE): now(f.KV_BYTES, f.KV_STATE)}, stacked=True),
                lines("KV memory used of the limit", SHARE, {BY: highest(f.KV_USAGE, f.STRATEGY)}),
                lines("Wasted of what is held", SHARE, {BY: ratio(_in_state("wasted"), now(f.KV_BYTES, f.STRATEGY))}),
                lines("Idle", BYTES, {BY: _in_state("idle")}),
                lines(
                    "Limits and floors",
                    BYTES,
                    {f"{BY} limit": now(f.KV_LIMIT, f.STRATEGY), f"{BY} floor": now(f.KV_FLOOR, f.STRATEGY)},
                ),
                lines("Blocks, by state", NUMBER, {each(f.BLOCK_STATE): now(f.KV_BLOCKS, f.BLOCK_STATE)}),
                lines("Copies on write", TIMES_A_SECOND, {BY: rate(f.KV_COPIES, f.STRATEGY)}),
            ],
            "Kept, and made room": [
                lines("Evicted", BYTES_A_SECOND, {BY: rate(f.KV_EVICTED, f.STRATEGY)}, width=6),
                _ages("Age of evicted blocks", f.BLOCK_LIFETIME),
                _ages("Idle before they were evicted", f.BLOCK_IDLE),
                _ages("Idle before they were used again", f.BLOCK_REUSE_GAP),
            ],
        },
    )


def _in_state(state: str) -> str:
    return now(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: state})


def _ages(title: str, family: MetricFamily[Histogram]) -> Timeseries:
    return lines(f"{title}, median", SECONDS, {BY: quantile(0.5, family, f.STRATEGY)}, width=6)
