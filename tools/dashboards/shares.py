"""Shares that several dashboards show. Knows no panel."""

from __future__ import annotations

from server.metrics import families as f
from server.metrics.families import Label
from tools.dashboards.promql import rate, ratio


def hit_rate(*by: Label) -> str:
    """Return the share of the prompt tokens looked up that were found."""
    return ratio(rate(f.PREFIX_HITS, *by), rate(f.PREFIX_QUERIES, *by))


def error_share(*by: Label) -> str:
    """Return the share of the requests that left the engine with an error."""
    return ratio(rate(f.REQUESTS, *by, where={f.OUTCOME: "error"}), rate(f.REQUESTS, *by))
