"""Writes metrics as text for Prometheus, from a snapshot: the families, and a flat list of numbers.

The engine counts in the list, and knows at which index a series begins (`registry.py`). The API process that serves
/metrics writes the text, so that no step waits for it. Knows no metric by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, cast

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram", "summary", "info"]
METRIC_CLASSES: Mapping[Kind, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
    "info": InfoMetricFamily,
}


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One series of a family: the values of its labels and, for an info metric, its constant values."""

    labels: tuple[str, ...]
    info: dict[str, str] = {}


class FamilyShape(msgspec.Struct, frozen=True, array_like=True):
    """A metric family's name, help text, labels and series, without the series' values."""

    kind: Kind
    name: str  # without the suffixes `_total` and `_info`
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]  # upper bounds of a histogram's buckets; one more bucket is above the last
    series: tuple[Series, ...]

    @property
    def num_values(self) -> int:
        """Return how many numbers a series of this family has in the list of all values.

        Of a histogram: a count for each bucket, then the sum; of a summary: count and sum.
        """
        match self.kind:
            case "histogram":
                return len(self.buckets) + 2
            case "summary":
                return 2
            case "info":
                return 0
        return 1


class Snapshot(msgspec.Struct, frozen=True):
    """The engine's message with all metrics: the encoded families, which never change, and an array of all values."""

    families: msgspec.Raw
    numbers: bytes


decode_families = msgspec.msgpack.Decoder(tuple[FamilyShape, ...]).decode
decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode


def encode_snapshot(families: Sequence[FamilyShape], numbers: bytes) -> bytes:
    """Return an encoded Snapshot; `numbers` are the values of all series, in their order."""
    return msgspec.msgpack.encode(Snapshot(msgspec.Raw(msgspec.msgpack.encode(families)), numbers))


class Renderer:
    """Writes snapshots as text; keeps the parts of the text that do not change from one snapshot to the next."""

    def __init__(self) -> None:
        self._encoded_families = b""
        self._families: tuple[FamilyShape, ...] = ()
        self._templates: dict[bool, list[str]] = {}  # by `openmetrics` (True, False): the texts around the values

    def render(self, encoded: bytes, *, openmetrics: bool) -> bytes:
        """Return the text of an encoded Snapshot, in Prometheus' format or in OpenMetrics 1.0."""
        snapshot = decode_snapshot(encoded)
        if bytes(snapshot.families) != self._encoded_families:
            self._encoded_families = bytes(snapshot.families)
            self._families, self._templates = decode_families(self._encoded_families), {}
        if openmetrics not in self._templates:
            self._templates[openmetrics] = _make_template(self._families, openmetrics=openmetrics)
        numbers = array("d", snapshot.numbers)
        before = self._templates[openmetrics]
        values = map(floatToGoString, _iter_sample_values(self._families, numbers))
        samples = "".join([part for pair in zip(before[:-1], values, strict=True) for part in pair])
        return (samples + before[-1]).encode()


def _iter_sample_values(families: Sequence[FamilyShape], numbers: Sequence[float]) -> Iterator[float]:
    """Yield the value of every sample, in the order in which the text has them."""
    at = 0
    for family in families:
        for _ in family.series:
            own = numbers[at : at + family.num_values]
            at += family.num_values
            match family.kind:
                case "histogram":
                    buckets = list(accumulate(own[:-1]))
                    yield from (*buckets, buckets[-1], own[-1])
                case "info":
                    yield 1.0
                case _:
                    yield from own


def _make_template(families: Sequence[FamilyShape], *, openmetrics: bool) -> list[str]:
    """Return the text before each sample's value, then that after the last value, as prometheus_client writes them."""
    registry = CollectorRegistry()
    registry.register(_Empty(families))
    # Names are not escaped: that would change `vllm:` to `vllm_`, though colons are allowed.
    text = (generate_openmetrics(registry, ALLOWUTF8) if openmetrics else generate_latest(registry)).decode()
    before = [""]
    for line in text.split("\n")[:-1]:  # not splitlines(): a label may contain other line separators
        if line.startswith("#"):
            before[-1] += f"{line}\n"
        else:
            before[-1] += line.rpartition(" ")[0] + " "
            before.append("\n")
    return before


class _Empty(Collector):
    """A collector for prometheus_client with all values zero: the text's template is made from its output."""

    def __init__(self, families: Sequence[FamilyShape]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_make_zero_metric, self._families)


def _make_zero_metric(family: FamilyShape) -> Metric:
    metric: Any = METRIC_CLASSES[family.kind](family.name, family.help, labels=family.labels)
    for series in family.series:
        match family.kind:
            case "histogram":
                edges = [*map(floatToGoString, family.buckets), "+Inf"]
                metric.add_metric(series.labels, [(edge, 0) for edge in edges], 0)
            case "summary":
                metric.add_metric(series.labels, 0, 0)
            case "info":
                metric.add_metric(series.labels, series.info)
            case _:
                metric.add_metric(series.labels, 0)
    return cast(Metric, metric)
