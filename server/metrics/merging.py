"""Merges the metrics of several replicas: each series gets a first label `replica`. Knows no metric by name."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from server.metrics.exposition import FamilyShape, Series, decode_families, decode_snapshot, encode_snapshot

LABEL = "replica"


def merge_snapshots(snapshots: Mapping[str, bytes]) -> bytes:
    """Return an encoded Snapshot with the series of encoded snapshots, which are given by replica."""
    shapes: dict[str, FamilyShape] = {}
    series: dict[str, list[Series]] = {}
    values: dict[str, array[float]] = {}
    for replica, encoded in snapshots.items():
        snapshot = decode_snapshot(encoded)
        numbers, at = array("d", snapshot.numbers), 0
        for family in decode_families(bytes(snapshot.families)):
            end = at + len(family.series) * family.num_values
            shapes.setdefault(family.name, family)
            series.setdefault(family.name, []).extend(label_series(family.series, replica))
            values.setdefault(family.name, array("d")).extend(numbers[at:end])
            at = end
    merged = [
        msgspec.structs.replace(shape, labels=(LABEL, *shape.labels), series=tuple(series[name]))
        for name, shape in shapes.items()
    ]
    return encode_snapshot(merged, b"".join(values[name].tobytes() for name in shapes))


def label_series(series: Sequence[Series], replica: str) -> list[Series]:
    """Return series with the value of the label `replica` before those of the others."""
    return [msgspec.structs.replace(each, labels=(replica, *each.labels)) for each in series]
