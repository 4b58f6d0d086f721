"""The types of the table of metrics in `families.py`: a metric family, and a label with its values. Knows no metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram, Info, Summary

PREFIX = "kvmux_"
NAME_SUFFIXES: Mapping[type, str] = {Counter: "_total", Info: "_info"}
SERIES_SUFFIXES: Mapping[type, tuple[str, ...]] = {
    Histogram: ("_bucket", "_sum", "_count"),
    Summary: ("_sum", "_count"),
}
M = TypeVar("M", Counter, Gauge, Histogram, Info, Summary)
Buckets = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Label:
    """A label and its values; None: the values are known only when the server starts, or a roll-out does."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class MetricFamily(Generic[M]):
    """One metric: its kind, name and labels; each combination of label values is a series."""

    kind: type[M]
    name: str  # without the prefix `kvmux_` and suffixes such as `_total`
    help: str
    labels: tuple[Label, ...] = ()
    buckets: Buckets = ()  # upper bounds of a histogram's buckets
    vllm_name: str | None = None  # vLLM's name without `vllm:`; None: vLLM has no such metric

    @property
    def exposed_name(self) -> str:
        """Return the name that Prometheus reads; series of histograms and summaries have further suffixes."""
        return f"{PREFIX}{self.name}{NAME_SUFFIXES.get(self.kind, '')}"

    @property
    def series_names(self) -> tuple[str, ...]:
        """Return the names of the family's series, as queries use them."""
        return tuple(self.exposed_name + part for part in SERIES_SUFFIXES.get(self.kind, ("",)))


def make_vllm_family(
    kind: type[M], name: str, help: str, labels: tuple[Label, ...], buckets: Buckets = ()
) -> MetricFamily[M]:
    """Return a metric family that vLLM has under the same name, with another prefix."""
    return MetricFamily(kind, name, help, labels, buckets, vllm_name=f"{name}{NAME_SUFFIXES.get(kind, '')}")


def format_table(families: Iterable[MetricFamily[Any]]) -> str:
    """Return the table of metrics in Markdown, with the names that vLLM has for them."""
    lines = ["| name | type | | vLLM's |", "|---|---|---|---|"]
    for family in families:
        labels = "{" + ", ".join(label.name for label in family.labels) + "}" if family.labels else ""
        kind, theirs = family.kind.__name__.lower(), f"`{family.vllm_name}`" if family.vllm_name else ""
        lines.append(f"| `{family.exposed_name}{labels}` | {kind} | {family.help} | {theirs} |")
    return "\n".join(lines)
