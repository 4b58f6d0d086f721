"""The report of a benchmark, as a table for people and as JSON for programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from config.tables import format_table
from loadtest.bench.figures import Figures, Key
from loadtest.bench.types import ServerInfo
from loadtest.bench.workloads import Workload

COLUMNS = (
    "requests",
    "errors",
    "TTFT p50",
    "TTFT p95",
    "ITL p50",
    "ITL p95",
    "end-to-end p50",
    "tokens/s",
    "cached",
)


@dataclass(frozen=True)
class BenchReport:
    """The figures of a benchmark, and how they were measured: server, date, options, workloads and notes."""

    server: ServerInfo
    date: datetime
    options: Mapping[str, Any]
    workloads: Sequence[Workload]
    notes: Sequence[str]
    figures: Mapping[Key, Figures]

    @property
    def num_failed(self) -> int:
        return sum(len(each.outcomes) - len(each.successes) for each in self.figures.values())

    def describe_workload(self, workload: str) -> str:
        """Return a description of the workload of that name, such as "8 at once, 256 tokens in, 128 out"."""
        return next(str(each) for each in self.workloads if each.name == workload)


def as_text(report: BenchReport) -> str:
    """Return the report as text: the server, notes, and a table in GitHub's Markdown."""
    server = report.server
    version = f"{server.listing.owned_by} {server.version}".strip()
    lines = [f"{server.listing.model} at {server.url}" + (f" ({version})" if version else "")]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(
        [
            *lines,
            "",
            _format_table(report),
            "",
            "Times in milliseconds; tokens/s are tokens of answers, all streams together.",
        ]
    )


def _format_table(report: BenchReport) -> str:
    names = ["workload", "what it is", "strategy" if report.server.listing.strategies else "model"]
    rows = [
        [
            f"{key.workload} {key.phase}".strip(),
            report.describe_workload(key.workload),
            key.strategy,
            *_format_cells(one),
        ]
        for key, one in report.figures.items()
    ]
    return format_table(names, COLUMNS, rows)


def _format_cells(figures: Figures) -> list[str]:
    ttft, itl, e2e = figures.ttft() or {}, figures.itl() or {}, figures.e2e() or {}
    times = (ttft.get("p50"), ttft.get("p95"), itl.get("p50"), itl.get("p95"), e2e.get("p50"))
    return [
        str(len(figures.outcomes)),
        str(len(figures.outcomes) - len(figures.successes)),
        *map(_format_number, times),
        _format_number(figures.output_throughput),
        "-" if figures.cache_hit_rate is None else f"{figures.cache_hit_rate:.0%}",
    ]


def _format_number(value: float | None) -> str:
    """Return a number as text, rounded to three significant digits, or to an integer from 100 on; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_json(report: BenchReport) -> dict[str, Any]:
    server = report.server
    return {
        "date": report.date.isoformat(timespec="seconds"),
        "server": {
            "url": server.url,
            "software": server.listing.owned_by,
            "version": server.version,
            "model": server.listing.model,
            "context": server.listing.max_model_len,
            "strategies": list(server.listing.strategies),
        },
        "client": {"python": platform.python_version(), "system": platform.platform()},
        "options": dict(report.options),
        "workloads": [
            {
                "name": each.name,
                "what": str(each),
                "requests": each.requests,
                "phases": list(filter(None, each.phases)),
            }
            for each in report.workloads
        ],
        "notes": list(report.notes),
        "results": [
            _result_to_dict(key, report.describe_workload(key.workload), figures)
            for key, figures in report.figures.items()
        ],
    }


def _result_to_dict(key: Key, description: str, figures: Figures) -> dict[str, Any]:
    return {
        "workload": key.workload,
        "what": description,
        "phase": key.phase or None,
        "strategy": key.strategy,
        "requests": len(figures.outcomes),
        "errors": len(figures.outcomes) - len(figures.successes),
        "messages": dict(figures.error_counts.most_common()),
        "not_of_asked_length": figures.num_wrong_length,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "completion_tokens": figures.completion_tokens,
        "pieces": figures.pieces,
        "seconds": sum(figures.round_seconds),
        "tokens_per_second": figures.output_throughput,
        "tokens_per_second_by_round": figures.output_throughput_by_round(),
        "ttft_ms": figures.ttft(),
        "itl_ms": figures.itl(),
        "full_batch_itl_ms": figures.full_batch_itl(),
        "e2e_ms": figures.e2e(),
    }
