"""vLLM's names for our metrics, so that dashboards and alerts made for vLLM, and routers that read its /metrics, work.

With the setting vllm_metric_names /metrics has these families beside ours. Labels that vLLM names otherwise are
renamed; a metric that vLLM has without a label is the sum over its values. vLLM's dashboards select by `model_name`;
here its value is a strategy instance, so that they compare strategies as they compare models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from server.metrics.exposition import FamilyShape, Series
from server.metrics.families import OUTCOME, REQUESTS, STRATEGY, WAIT_REASON, WAITING
from server.metrics.metric_family import MetricFamily


class Alias(NamedTuple):
    """A metric family under vLLM's name; each of its series is the sum of some of our series."""

    shape: FamilyShape
    sources: tuple[tuple[Series, ...], ...]  # for each series of `shape`, our series that it sums


def make_alias(family: MetricFamily[Any], shape: FamilyShape) -> Alias | None:
    """Return a family of ours under vLLM's name and with vLLM's labels; None if vLLM has no such metric."""
    if family.vllm_name is None:
        return None
    summed: dict[tuple[str, ...], list[Series]] = {}
    for series in shape.series:
        summed.setdefault(tuple(_make_vllm_labels(family, series.labels).values()), []).append(series)
    name = f"vllm:{family.vllm_name}"
    theirs = FamilyShape(
        shape.kind,
        name.removesuffix("_total") if shape.kind == "counter" else name,
        shape.help,
        tuple(_make_vllm_labels(family, shape.labels)),
        shape.buckets,
        tuple(Series(labels) for labels in summed),
    )
    return Alias(theirs, tuple(map(tuple, summed.values())))


def _make_vllm_labels(family: MetricFamily[Any], values: tuple[str, ...]) -> dict[str, str]:
    """Return the labels that a series has in vLLM: values by label name."""
    labels = {label.name: value for label, value in zip(family.labels, values, strict=True)}
    if family is WAITING:
        del labels[WAIT_REASON.name]
    if family is REQUESTS:
        outcome = labels.pop(OUTCOME.name)
        labels["finished_reason"] = "abort" if outcome == "cancelled" else outcome
    if STRATEGY in family.labels:
        labels["model_name"] = labels[STRATEGY.name]
    return labels
