"""Builds PromQL over kvmux's metrics, filtered by the dashboards' variables `server` and `strategy`.

Names of metrics and labels come from the table in server/metrics/families.py; unknown ones are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.metrics.families import FAMILIES, STRATEGY
from server.metrics.metric_family import PREFIX, Label, MetricFamily

INTERVAL = "$__rate_interval"  # a Grafana variable: long enough for several scrapes
SERVER = Label("instance")  # a label that Prometheus adds: the scraped address
SERVER_VARIABLE, STRATEGY_VARIABLE = "server", "strategy"

_BY_SERIES: Mapping[str, MetricFamily[Any]] = {series: family for family in FAMILIES for series in family.series_names}


def select(family: MetricFamily[Any], part: str = "", where: Mapping[Label, str] | None = None) -> str:
    """Return a selector of a metric's series at the chosen servers and strategies.

    `part` is a suffix of histograms and summaries, such as `_sum`; `where` are further label values.
    """
    assert family.exposed_name + part in family.series_names
    matchers = [f'{SERVER.name}=~"${SERVER_VARIABLE}"']
    if STRATEGY in family.labels:
        matchers.append(f'{STRATEGY.name}=~"${STRATEGY_VARIABLE}"')
    for label, value in (where or {}).items():
        assert label in family.labels
        assert label.values is None or value in label.values
        matchers.append(f'{label.name}="{value}"')
    return f"{family.exposed_name}{part}{{{', '.join(matchers)}}}"


def sum_by(family: MetricFamily[Any], *by: Label, where: Mapping[Label, str] | None = None) -> str:
    """Return the sum of a gauge's or counter's values over all labels but `by`."""
    return _aggregate("sum", family, by, select(family, where=where))


def max_by(family: MetricFamily[Any], *by: Label) -> str:
    """Return the maximum of a gauge over all labels but `by`."""
    return _aggregate("max", family, by, select(family))


def rate(family: MetricFamily[Any], *by: Label, part: str = "", where: Mapping[Label, str] | None = None) -> str:
    """Return a counter's rate per second, summed over all labels but `by`."""
    return _aggregate("sum", family, by, f"rate({select(family, part, where)}[{INTERVAL}])")


def quantile(share: float, family: MetricFamily[Any], *by: Label) -> str:
    """Return a histogram's quantile, such as 0.95, by the labels `by`."""
    buckets = _aggregate("sum", family, by, f"rate({select(family, '_bucket')}[{INTERVAL}])", "le")
    return f"histogram_quantile({share}, {buckets})"


def mean(family: MetricFamily[Any], *by: Label) -> str:
    """Return the mean of a histogram's or summary's observations, by the labels `by`."""
    return ratio(rate(family, *by, part="_sum"), rate(family, *by, part="_count"))


def product(one: str, other: str) -> str:
    """Return the expression one * other, of vectors with the same labels."""
    return f"{one} * {other}"


def ratio(part: str, whole: str) -> str:
    """Return the expression part / whole, which has no value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def ratio_to_all(part: str, whole: str) -> str:
    """Return the expression part / whole for a whole without labels."""
    return f"{part} / on() group_left() ({whole} > 0)"


def make_legend(*labels: Label) -> str:
    """Return a Grafana legend that shows the values of these labels."""
    return " ".join(f"{{{{{label.name}}}}}" for label in labels)


def find_families(text: str) -> list[MetricFamily[Any]]:
    """Return the metric families whose series occur in a text. Raises KeyError for an unknown series."""
    return list({_BY_SERIES[name]: None for name in re.findall(rf"\b{PREFIX}\w+", text)})


def fill_variables(expression: str, interval: str = "1m", values: str = ".+") -> str:
    """Return an expression with Grafana's variables replaced by values, as Prometheus takes it."""
    for variable in (SERVER_VARIABLE, STRATEGY_VARIABLE):
        expression = expression.replace(f'"${variable}"', f'"{values}"')
    return expression.replace(INTERVAL, interval)


def _aggregate(how: str, family: MetricFamily[Any], by: tuple[Label, ...], series: str, *further: str) -> str:
    assert set(by) <= {*family.labels, SERVER}
    names = ", ".join([label.name for label in by] + list(further))
    return f"{how} by ({names}) ({series})" if names else f"{how}({series})"
