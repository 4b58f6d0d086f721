"""Memory and hit rate: who holds what, what was found in it, and why no more."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from server.metrics import families as f
from server.metrics.dashboards.panels import (
    BYTES,
    BYTES_A_SECOND,
    SHARE,
    TOKENS_A_SECOND,
    dashboard,
    lines,
)
from server.metrics.dashboards.promql import each, highest, now, rate, ratio

BY = each(f.STRATEGY)


def memory() -> Dashboard:
    return dashboard(
        "memory",
        "memory and hit rate",
        "Where KV memory is, what prompts found in it, and what had to make room.",
        {
            "Found": [
                lines(
                    "Hit rate",
                    SHARE,
                    {BY: ratio(rate(f.PREFIX_HITS, f.STRATEGY), rate(f.PREFIX_QUERIES, f.STRATEGY))},
                ),
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
                lines("By state", BYTES, {each(f.KV_STATE): now(f.KV_BYTES, f.KV_STATE)}, stacked=True),
                lines("By strategy", BYTES, {BY: now(f.KV_BYTES, f.STRATEGY)}, stacked=True),
                lines("Limits", BYTES, {BY: now(f.KV_LIMIT, f.STRATEGY)}),
                lines("Used of the limit", SHARE, {BY: highest(f.KV_USAGE, f.STRATEGY)}),
                lines(
                    "Wasted of what is held",
                    SHARE,
                    {BY: ratio(now(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: "wasted"}), now(f.KV_BYTES, f.STRATEGY))},
                ),
                lines("Idle", BYTES, {BY: now(f.KV_BYTES, f.STRATEGY, where={f.KV_STATE: "idle"})}),
            ],
            "Made room": [
                lines("Evicted", BYTES_A_SECOND, {BY: rate(f.KV_EVICTED, f.STRATEGY)}),
            ],
        },
    )
