"""The text of a snapshot is the one that prometheus_client's own metrics have after the same events."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary, disable_created_metrics
from prometheus_client import generate_latest as text_of
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_of

from server.metrics.exposition import FamilyShape, Kind, Renderer, Series, Snapshot

KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram, "summary": Summary, "info": Info}
WORDS = ("a", "a b", 'quo"te', "back\\slash", "line\nbreak", "next\x85line", "#", "naïve", "")


@pytest.fixture(autouse=True)
def _no_created() -> None:
    disable_created_metrics()


def drawn_family(draw: random.Random, number: int) -> FamilyShape:
    kind: Kind = draw.choice(("counter", "gauge", "histogram", "summary", "info"))
    labels = tuple(draw.sample(("zone", "area", "where"), draw.randrange(3)))
    values = {tuple(draw.choice(WORDS) for _ in labels) for _ in range(4 if labels else 1)}
    series = [Series(each, {"said": draw.choice(WORDS)} if kind == "info" else {}) for each in sorted(values)]
    edges = tuple(sorted(draw.sample((0.001, 0.5, 1.0, 2.5, 1e6, 3e-7), 3))) if kind == "histogram" else ()
    return FamilyShape(kind, f"kvmux_{kind}_{number}", draw.choice(WORDS[:5]), labels, edges, tuple(series))


def happen(draw: random.Random, family: FamilyShape, registry: CollectorRegistry) -> list[float]:
    """Feed the same random values to prometheus_client's metric and to the numbers that are returned."""
    how = {"buckets": family.buckets} if family.kind == "histogram" else {}
    metric = KINDS[family.kind](family.name, family.help, family.labels, registry=registry, **how)
    numbers = []
    for series in family.series:
        theirs = metric.labels(*series.labels) if family.labels else metric
        ours = [0.0] * family.num_values
        for _ in range(draw.randrange(6)):
            value = draw.choice((0.0, 0.5, 1.0, 7.0, 2.5e-8, 1e22, draw.random()))
            if family.kind == "counter":
                theirs.inc(value)
                ours[0] += value
            elif family.kind == "gauge":
                theirs.set(value)
                ours[0] = value
            elif family.kind != "info":
                theirs.observe(value)
                ours[bisect_left(family.buckets, value) if family.buckets else 0] += 1
                ours[-1] += value
        if family.kind == "info":
            theirs.info(series.info)
        numbers += ours
    return numbers


def test_the_text_is_prometheus_clients() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw, renderer = random.Random(seed), Renderer()
    for _ in range(20):
        registry = CollectorRegistry()
        families = [drawn_family(draw, number) for number in range(8)]
        encoded = msgspec.msgpack.encode(families)
        numbers = array("d", [number for family in families for number in happen(draw, family, registry)])
        snapshot = msgspec.msgpack.encode(Snapshot(msgspec.Raw(encoded), numbers.tobytes()))
        for _ in range(2):  # the second time from what was kept
            assert renderer.render(snapshot, openmetrics=False) == text_of(registry)
            assert renderer.render(snapshot, openmetrics=True) == openmetrics_of(registry)


def test_the_same_families_with_other_numbers() -> None:
    family = FamilyShape("counter", "kvmux_things", "Things.", (), (), (Series(()),))
    encoded, renderer = msgspec.Raw(msgspec.msgpack.encode([family])), Renderer()
    for value in (1.0, 2.0):
        snapshot = msgspec.msgpack.encode(Snapshot(encoded, array("d", [value]).tobytes()))
        assert f"kvmux_things_total {value}\n" in renderer.render(snapshot, openmetrics=False).decode()
