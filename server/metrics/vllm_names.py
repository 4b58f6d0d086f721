"""vLLM's names for our metrics, so that dashboards and alerts made for vLLM work with them.

Two ways give the same series: recording rules of Prometheus, and families that the server itself exposes with the
setting vllm_metric_names. Labels that vLLM names otherwise are renamed; a metric that vLLM has without a label is
the sum over its values. vLLM's dashboards select by `model_name`; here its value is a strategy instance, so that they
compare strategies as they compare models.

`python -m server.metrics.vllm_names` writes config/prometheus/vllm_names.yml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from server.metrics.exposition import FamilyShape, Series
from server.metrics.families import FAMILIES, OUTCOME, REQUESTS, STRATEGY, WAIT_REASON, WAITING
from server.metrics.metric_family import MetricFamily

RULES_FILE = Path(__file__).parents[2] / "config" / "prometheus" / "vllm_names.yml"

RULES_HEADER = """\
# vLLM's names for our metrics. Written by `python -m server.metrics.vllm_names`; do not edit.
groups:
  - name: vllm_names
    rules:
"""


def iter_rules() -> Iterator[tuple[str, str]]:
    """Yield vLLM's names, each with the expression that computes it from our metrics."""
    for family in FAMILIES:
        if family.vllm_name is not None:
            for series in family.series_names:
                yield (
                    f"vllm:{family.vllm_name}{series.removeprefix(family.exposed_name)}",
                    _make_expression(family, series),
                )


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


def format_rules_file() -> str:
    """Return the contents of RULES_FILE, the recording rules for Prometheus."""
    return RULES_HEADER + "".join(
        f"      - record: {name}\n        expr: '{expression}'\n" for name, expression in iter_rules()
    )


def _make_expression(family: MetricFamily[Any], series: str) -> str:
    if family is WAITING:
        series = f"sum without ({WAIT_REASON.name}) ({series})"
    if family is REQUESTS:
        series = f"sum without ({OUTCOME.name}) ({_relabel_finished_reason(series)})"
    return _relabel(series, "model_name", STRATEGY.name) if STRATEGY in family.labels else series


def _relabel_finished_reason(series: str) -> str:
    """Return a query that adds the label finished_reason to `series`: our `outcome`, with `abort` for `cancelled`."""
    return _relabel(
        _relabel(series, "finished_reason", OUTCOME.name), "finished_reason", OUTCOME.name, "cancelled", "abort"
    )


def _relabel(series: str, new: str, old: str, which: str = "(.*)", value: str = "$1") -> str:
    return f'label_replace({series}, "{new}", "{value}", "{old}", "{which}")'


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m server.metrics.vllm_names", description=__doc__).parse_args()
    RULES_FILE.write_text(format_rules_file())
    print(RULES_FILE.name)
