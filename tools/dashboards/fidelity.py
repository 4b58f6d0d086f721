"""The dashboard of fidelity and roll-outs: how far candidates are from what serves, and the stages of roll-outs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard

from server.metrics import families as f
from tools.dashboards.panels import (
    NUMBER,
    REQUESTS_A_SECOND,
    SHARE,
    TIMES_A_SECOND,
    TOKENS_A_SECOND,
    make_dashboard,
    make_timeseries,
)
from tools.dashboards.promql import make_legend, max_by, mean, quantile, rate, ratio

PAIR_LEGEND = make_legend(*f.BY_PAIR)
ROLLOUT_LEGEND = make_legend(f.ROLLOUT)


def build_fidelity_dashboard() -> Dashboard:
    return make_dashboard(
        "fidelity",
        "fidelity and roll-outs",
        "How far candidate instances are from those that serve, token by token, and the stages of roll-outs.",
        {"Fidelity": _make_fidelity_panels(), "Roll-outs": _make_rollout_panels()},
    )


def _make_fidelity_panels() -> list[Timeseries]:
    return [
        make_timeseries("KL divergence per token, mean (nats)", NUMBER, {PAIR_LEGEND: mean(f.SHADOW_KL, *f.BY_PAIR)}),
        make_timeseries(
            "KL divergence per token, 99th percentile (nats)",
            NUMBER,
            {PAIR_LEGEND: quantile(0.99, f.SHADOW_KL, *f.BY_PAIR)},
        ),
        make_timeseries(
            "Tokens with the same likeliest token",
            SHARE,
            {PAIR_LEGEND: ratio(rate(f.SHADOW_AGREED, *f.BY_PAIR), rate(f.SHADOW_TOKENS, *f.BY_PAIR))},
        ),
        make_timeseries("The same, since the engine's start", SHARE, {PAIR_LEGEND: max_by(f.SHADOW_TOP1, *f.BY_PAIR)}),
        make_timeseries("Compared tokens", TOKENS_A_SECOND, {PAIR_LEGEND: rate(f.SHADOW_TOKENS, *f.BY_PAIR)}),
        make_timeseries(
            "Tokens computed for shadows",
            TOKENS_A_SECOND,
            {make_legend(f.STRATEGY): rate(f.SHADOW_COMPUTED, f.STRATEGY)},
        ),
        make_timeseries(
            "Compared requests by result",
            REQUESTS_A_SECOND,
            {make_legend(f.SHADOW_RESULT): rate(f.SHADOW_REQUESTS, f.SHADOW_RESULT)},
            stacked=True,
        ),
    ]


def _make_rollout_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "Requests served by the candidate", SHARE, {ROLLOUT_LEGEND: max_by(f.ROLLOUT_SHARE, f.ROLLOUT)}
        ),
        make_timeseries(
            "State",
            NUMBER,
            {make_legend(f.ROLLOUT, f.ROLLOUT_STATE): max_by(f.ROLLOUT_CURRENT, f.ROLLOUT, f.ROLLOUT_STATE)},
        ),
        make_timeseries("Roll-backs", TIMES_A_SECOND, {ROLLOUT_LEGEND: rate(f.ROLLBACKS, f.ROLLOUT)}),
    ]
