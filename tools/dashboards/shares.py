"""PromQL expressions of shares that several dashboards show."""

from __future__ import annotations

from server.metrics import families as f
from server.metrics.metric_family import Label
from tools.dashboards.promql import rate, ratio


def hit_rate(*by: Label) -> str:
    """Return the query for the prefix cache hit rate: hits / queries, in tokens, by the labels `by`."""
    return ratio(rate(f.PREFIX_HITS, *by), rate(f.PREFIX_QUERIES, *by))


def error_share(*by: Label) -> str:
    """Return the query for the share of finished requests that ended with an error, by the labels `by`."""
    return ratio(rate(f.REQUESTS, *by, where={f.OUTCOME: "error"}), rate(f.REQUESTS, *by))
