"""Kernels and engine: what a step is made of, and what the process needs. Nothing here is by strategy."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from server.metrics import families as f
from tools.dashboards.panels import (
    BYTES,
    NUMBER,
    SECONDS,
    TIMES_A_SECOND,
    dashboard,
    facts,
    lines,
    number,
)
from tools.dashboards.promql import each, highest, mean, now, quantile, rate, ratio, ratio_to_all

TIMED = rate(f.TIMED_STEP_SECONDS, part="_count")
BY_OPERATION = ratio_to_all(rate(f.KERNEL_SECONDS, f.OP, part="_sum"), TIMED)
REST = ratio(f"({rate(f.TIMED_STEP_SECONDS, part='_sum')} - {rate(f.KERNEL_SECONDS, part='_sum')})", TIMED)


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
            "Kernels, in steps that were timed": [
                lines(
                    "Time of a step, by operation",
                    SECONDS,
                    {each(f.OP): f"{BY_OPERATION} > 0", "the rest": REST},
                    stacked=True,
                    width=12,
                ),
                lines(
                    "Time of a step, by what its rows do",
                    SECONDS,
                    {each(f.PHASE): mean(f.TIMED_STEP_SECONDS, f.PHASE)},
                    width=6,
                ),
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
            "Processes and device": [
                lines("Processes", BYTES, {each(f.ROLE): now(f.PROCESS_MEMORY, f.ROLE)}, stacked=True, width=9),
                lines(
                    "Device", BYTES, {each(f.DEVICE_STATE): now(f.DEVICE_MEMORY, f.DEVICE_STATE)}, stacked=True, width=9
                ),
                number("Restarts of the engine", NUMBER, now(f.ENGINE_RESTARTS), bad_from=1, width=6),
            ],
            "What runs": [facts("Build", f.BUILD, height=9), facts("Settings", f.SETTINGS, height=9)],
        },
    )
