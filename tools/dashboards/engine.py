"""The dashboard of engine and kernels: steps, operations, processes and devices, for all strategies together."""

from __future__ import annotations

from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard

from server.metrics import families as f
from tools.dashboards.panels import (
    BYTES,
    NUMBER,
    REQUESTS_A_SECOND,
    SECONDS,
    SHARE,
    TIMES_A_SECOND,
    Panel,
    make_dashboard,
    make_info_table,
    make_stat,
    make_timeseries,
)
from tools.dashboards.promql import make_legend, max_by, mean, quantile, rate, ratio, ratio_to_all, sum_by

TIMED = rate(f.TIMED_STEP_SECONDS, part="_count")
BY_OPERATION = ratio_to_all(rate(f.KERNEL_SECONDS, f.OP, part="_sum"), TIMED)
REST = ratio(f"({rate(f.TIMED_STEP_SECONDS, part='_sum')} - {rate(f.KERNEL_SECONDS, part='_sum')})", TIMED)


def build_engine_dashboard() -> Dashboard:
    return make_dashboard(
        "engine",
        "kernels and engine",
        "Engine steps, the time of each kernel operation, memory of processes and devices.",
        {
            "Steps": _make_step_panels(),
            "Kernels (sampled steps)": _make_kernel_panels(),
            "Structured output": _make_grammar_panels(),
            "Processes and device": _make_process_panels(),
            "Build and settings": _make_settings_panels(),
        },
    )


def _make_step_panels() -> list[Timeseries]:
    return [
        make_timeseries("Steps", TIMES_A_SECOND, {"steps": rate(f.STEPS)}),
        make_timeseries(
            "Step time",
            SECONDS,
            {
                "mean": mean(f.STEP_SECONDS),
                "p50": quantile(0.5, f.STEP_SECONDS),
                "p95": quantile(0.95, f.STEP_SECONDS),
            },
        ),
        make_timeseries(
            "Batch size of a step, mean",
            NUMBER,
            {"sequences": mean(f.STEP_ROWS), "tokens": mean(f.STEP_TOKENS)},
        ),
    ]


def _make_kernel_panels() -> list[Panel]:
    return [
        make_timeseries(
            "Step time by operation",
            SECONDS,
            {make_legend(f.OP): f"{BY_OPERATION} > 0", "other": REST},
            stacked=True,
            width=12,
        ),
        make_timeseries(
            "Step time by phase",
            SECONDS,
            {make_legend(f.PHASE): mean(f.TIMED_STEP_SECONDS, f.PHASE)},
            width=6,
        ),
        make_stat(
            "Fallback operations",
            NUMBER,
            f"{max_by(f.KERNEL_FALLBACK, f.OP)} > 0",
            legend=make_legend(f.OP),
            red_from=1,
            no_value="none",
            width=6,
        ),
    ]


def _make_grammar_panels() -> list[Timeseries]:
    return [
        make_timeseries(
            "Constrained requests",
            REQUESTS_A_SECOND,
            {make_legend(f.CONSTRAINT): rate(f.CONSTRAINED_REQUESTS, f.CONSTRAINT)},
            stacked=True,
            width=6,
        ),
        make_timeseries(
            "Refused constraints",
            REQUESTS_A_SECOND,
            {make_legend(f.CONSTRAINT_REFUSAL): rate(f.REFUSED_CONSTRAINTS, f.CONSTRAINT_REFUSAL)},
            stacked=True,
            width=6,
        ),
        make_timeseries(
            "Time of grammars",
            SECONDS,
            {
                "in a step, mean": mean(f.GRAMMAR_STEP_SECONDS),
                "in a step, p95": quantile(0.95, f.GRAMMAR_STEP_SECONDS),
                "to compile one, mean": mean(f.GRAMMAR_COMPILE_SECONDS),
                "to compile one, p95": quantile(0.95, f.GRAMMAR_COMPILE_SECONDS),
            },
            width=6,
        ),
        make_timeseries(
            "Grammars compiled before",
            SHARE,
            {"hit rate": ratio(rate(f.GRAMMAR_HITS), rate(f.GRAMMAR_LOOKUPS))},
            width=6,
        ),
    ]


def _make_process_panels() -> list[Panel]:
    return [
        make_timeseries(
            "Process memory",
            BYTES,
            {make_legend(f.ROLE): sum_by(f.PROCESS_MEMORY, f.ROLE)},
            stacked=True,
            width=9,
        ),
        make_timeseries(
            "Device memory",
            BYTES,
            {make_legend(f.DEVICE_STATE): sum_by(f.DEVICE_MEMORY, f.DEVICE_STATE)},
            stacked=True,
            width=9,
        ),
        make_stat("Engine restarts", NUMBER, sum_by(f.ENGINE_RESTARTS), red_from=1, width=6),
    ]


def _make_settings_panels() -> list[Table]:
    return [
        make_info_table("Build", f.BUILD, height=9),
        make_info_table("Settings", f.SETTINGS, height=9),
    ]
