"""Kernels and engine: what a step is made of, and what the process needs. Nothing here is by strategy."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from server.metrics import families as f
from server.metrics.dashboards.panels import (
    NUMBER,
    SECONDS,
    TIMES_A_SECOND,
    dashboard,
    lines,
    number,
)
from server.metrics.dashboards.promql import each, highest, mean, quantile, rate


def engine() -> Dashboard:
    return dashboard(
        "engine",
        "kernels and engine",
        "Steps, what enters them, and the operations that compute them.",
        {
            "Steps": [
                lines("Steps", TIMES_A_SECOND, {"steps": rate(f.STEPS)}),
                lines(
                    "Time of a step",
                    SECONDS,
                    {
                        "mean": mean(f.STEP_SECONDS),
                        "p50": quantile(0.5, f.STEP_SECONDS),
                        "p95": quantile(0.95, f.STEP_SECONDS),
                    },
                ),
                lines(
                    "In a step, mean",
                    NUMBER,
                    {"sequences": mean(f.STEP_ROWS), "tokens": mean(f.STEP_TOKENS)},
                ),
            ],
            "Kernels": [
                number(
                    "Operations that fell back",
                    NUMBER,
                    f"{highest(f.KERNEL_FALLBACK, f.OP)} > 0",
                    legend=each(f.OP),
                    bad_from=1,
                    nothing="none",
                    width=6,
                ),
            ],
        },
    )
