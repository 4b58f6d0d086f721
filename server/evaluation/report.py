"""The results of an evaluation (`EvaluationReport`), and their form as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from config.tables import format_table
from server.evaluation.compare import Fidelity
from server.evaluation.suites.report import SuiteReport, format_suites, suites_to_json

NEAREST_BOUND = 64  # end of the nearest range of distances between answer and mention, in tokens


class DistanceRange(NamedTuple):
    """A range of distances between an answer and its latest mention, in tokens, both ends included."""

    nearest: int
    farthest: int

    def __str__(self) -> str:
        return f"{self.nearest:,}-{self.farthest:,}"  # a hyphen, as some terminals cannot print an en dash


@dataclass(frozen=True)
class StrategyResult:
    """A strategy, its memory, and its fidelity to exact caching on running text and on records."""

    name: str
    kind: str
    options: dict[str, Any]
    exact: bool
    kv_bytes: int  # bytes of KV memory for a document of full length
    text: Fidelity
    records: Fidelity


@dataclass(frozen=True)
class EvaluationReport:
    """The results of one evaluation; results[0] is the strategy that the others are compared with.

    It is exact, unless documents are longer than the model's context.
    """

    model: str
    device: str
    dtype: str
    source: str  # source of the running text: a file's name or "stories"
    num_documents: tuple[int, int]  # numbers of (documents of running text, records)
    length: int  # tokens of a document
    row_tokens: int  # the most tokens of a document that a step computed
    results: Sequence[StrategyResult]
    suites: SuiteReport | None = None

    @property
    def distance_ranges(self) -> list[DistanceRange]:
        """The ranges for recall: 1 to 64 tokens, 65 to 128, and so on to the length of a document."""
        ranges = [DistanceRange(1, min(NEAREST_BOUND, self.length))]
        while ranges[-1].farthest < self.length:
            ranges.append(DistanceRange(ranges[-1].farthest + 1, min(2 * ranges[-1].farthest, self.length)))
        return ranges


def as_table(report: EvaluationReport) -> str:
    """Return the results as tables in GitHub's Markdown; "recall" is the share of right answers by distance."""
    columns = [
        "KV memory",
        "perplexity",
        "top-1",
        "KL",
        "KL median",
        "KL 99 %",
        "records: top-1",
        "records: KL",
        *(f"recall {s}" for s in report.distance_ranges),
    ]
    rows = [
        [
            r.name,
            f"{r.kv_bytes / 1024:,.0f} KiB",
            f"{r.text.perplexity:.3f}",
            *_format_fidelity(r.text),
            *(format_nats(r.text.kl_quantile(share)) for share in (0.5, 0.99)),
            *_format_fidelity(r.records),
            *(_format_share(*r.records.recall(*span)) for span in report.distance_ranges),
        ]
        for r in report.results
    ]
    table = format_table(["strategy"], columns, rows)
    return table if report.suites is None else f"{table}\n\n{format_suites(report.suites)}"


def _format_fidelity(f: Fidelity) -> tuple[str, str]:
    """Return (share of tokens with the same likeliest token, KL divergence)."""
    return (f"{f.agreement:.2%}", format_nats(f.kl)) if f.num_tokens else ("-", "-")


def format_nats(value: float) -> str:
    """Return a KL divergence with four digits after the point, or with its magnitude if it is smaller."""
    return "0" if abs(value) < 1e-9 else f"{value:.4f}" if value >= 1e-4 else f"{value:.0e}"


def _format_share(right: int, asked: int) -> str:
    return f"{right / asked:.0%}" if asked else "-"


def as_json(report: EvaluationReport) -> dict[str, Any]:
    return {
        "model": report.model,
        "device": report.device,
        "dtype": report.dtype,
        "source": report.source,
        "documents": dict(zip(("text", "records"), report.num_documents, strict=True)),
        "length": report.length,
        "row_tokens": report.row_tokens,
        "exact": report.results[0].name if report.results[0].exact else None,
        "strategies": [
            {
                "name": r.name,
                "kind": r.kind,
                "options": r.options,
                "exact": r.exact,
                "kv_bytes": r.kv_bytes,
                "text": _fidelity_to_json(r.text),
                "records": _fidelity_to_json(r.records)
                | {"recall": [_recall_to_json(r, span) for span in report.distance_ranges]},
            }
            for r in report.results
        ],
        "suites": None if report.suites is None else suites_to_json(report.suites),
    }


def _fidelity_to_json(f: Fidelity) -> dict[str, Any]:
    figures = {
        "perplexity": f.perplexity,
        "top1_agreement": f.agreement,
        "kl_nats": f.kl,
        "kl_median": f.kl_quantile(0.5),
        "kl_p99": f.kl_quantile(0.99),
    }
    # JSON has neither infinity nor NaN
    return {"tokens": f.num_tokens} | {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _recall_to_json(result: StrategyResult, span: DistanceRange) -> dict[str, int]:
    right, asked = result.records.recall(*span)
    return {"from": span.nearest, "to": span.farthest, "right": right, "asked": asked}
