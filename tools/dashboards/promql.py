"""PromQL over our families, with the variables that every dashboard has. Knows no panel.

Names of metrics and of labels come from the table: what is renamed there is renamed here, what is not there is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.metrics.families import FAMILIES, PREFIX, STRATEGY, Label, MetricFamily

INTERVAL = "$__rate_interval"  # Grafana's: long enough for several scrapes
SERVER = Label("instance")  # Prometheus' own, for where it scrapes
SERVER_VARIABLE, STRATEGY_VARIABLE = "server", "strategy"

_BY_SERIES: Mapping[str, MetricFamily[Any]] = {series: family for family in FAMILIES for series in family.series_names}


def select(family: MetricFamily[Any], part: str = "", where: Mapping[Label, str] | None = None) -> str:
    """Select the series at the chosen servers and strategies. Histograms and summaries have parts, as `_sum`."""
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
    """Sum a gauge, or how far a counter has come, over all labels but `by`."""
    return _aggregate("sum", family, by, select(family, where=where))


def max_by(family: MetricFamily[Any], *by: Label) -> str:
    """Return the maximum of a gauge that cannot be summed."""
    return _aggregate("max", family, by, select(family))


def rate(family: MetricFamily[Any], *by: Label, part: str = "", where: Mapping[Label, str] | None = None) -> str:
    """Return a counter's growth a second, summed over all labels but `by`."""
    return _aggregate("sum", family, by, f"rate({select(family, part, where)}[{INTERVAL}])")


def quantile(share: float, family: MetricFamily[Any], *by: Label) -> str:
    """Return the value of a histogram below which this share of the observations lies."""
    buckets = _aggregate("sum", family, by, f"rate({select(family, '_bucket')}[{INTERVAL}])", "le")
    return f"histogram_quantile({share}, {buckets})"


def mean(family: MetricFamily[Any], *by: Label) -> str:
    """Return the mean of what a histogram or a summary observed."""
    return ratio(rate(family, *by, part="_sum"), rate(family, *by, part="_count"))


def ratio(part: str, whole: str) -> str:
    """Divide; without a value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def ratio_to_all(part: str, whole: str) -> str:
    """Divide by a whole that has none of the labels of its parts."""
    return f"{part} / on() group_left() ({whole} > 0)"


def make_legend(*labels: Label) -> str:
    """Return a legend that names a line by its labels."""
    return " ".join(f"{{{{{label.name}}}}}" for label in labels)


def find_families(text: str) -> list[MetricFamily[Any]]:
    """Return the families whose series a text names, each once. Raises KeyError for a series that nobody exposes."""
    return list({_BY_SERIES[name]: None for name in re.findall(rf"\b{PREFIX}\w+", text)})


def fill_variables(expression: str, interval: str = "1m", values: str = ".+") -> str:
    """Return an expression with values for its variables, as Prometheus takes it."""
    for variable in (SERVER_VARIABLE, STRATEGY_VARIABLE):
        expression = expression.replace(f'"${variable}"', f'"{values}"')
    return expression.replace(INTERVAL, interval)


def _aggregate(how: str, family: MetricFamily[Any], by: tuple[Label, ...], series: str, *further: str) -> str:
    assert set(by) <= {*family.labels, SERVER}
    names = ", ".join([label.name for label in by] + list(further))
    return f"{how} by ({names}) ({series})" if names else f"{how}({series})"
