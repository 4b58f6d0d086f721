"""Three kinds of panels, and dashboards of them, as data that is built with Grafana's SDK.

A panel's description is the help text of the metrics in its queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from prometheus_client import Info

from server.metrics.families import KV_LIMIT, STEPS, STRATEGY
from server.metrics.metric_family import Label, MetricFamily
from tools.dashboards.promql import SERVER, SERVER_VARIABLE, STRATEGY_VARIABLE, find_families, select

TAG = "kvmux"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Graph:
    """A panel of time series; `queries` maps legends to PromQL, and `note` begins the description."""

    title: str
    unit: str
    queries: Mapping[str, str]
    stacked: bool = False
    width: int = 8
    note: str = ""

    def build(self) -> Timeseries:
        panel = (
            Timeseries()
            .title(self.title)
            .description(_describe(self.queries, self.note))
            .datasource(PROMETHEUS)
            .unit(self.unit)
            .min(0)
            .span(self.width)
            .height(8)
            .line_width(1)
            .fill_opacity(40 if self.stacked else 8)
            .show_points(VisibilityMode.NEVER)
            .legend(
                VizLegendOptions()
                .show_legend(True)
                .display_mode(LegendDisplayMode.TABLE)
                .placement(LegendPlacement.BOTTOM)
                .calcs(["lastNotNull", "max"])
            )
            .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
            .targets([*_make_targets(self.queries)])
        )
        return panel.stacking(StackingConfig().mode(StackingMode.NORMAL)) if self.stacked else panel


@dataclass(frozen=True)
class Stat:
    """A panel of the latest value, red from `red_from` on; with a legend it shows the names of the series."""

    title: str
    unit: str
    query: str
    legend: str = ""
    red_from: float | None = None
    no_value: str = "-"
    width: int = 3

    def build(self) -> StatPanel:
        red = [] if self.red_from is None else [Threshold(value=self.red_from, color="red")]
        return (
            StatPanel()
            .title(self.title)
            .description(_describe({self.legend: self.query}))
            .datasource(PROMETHEUS)
            .unit(self.unit)
            .no_value(self.no_value)
            .span(self.width)
            .height(4)
            .color_mode(BigValueColorMode.VALUE)
            .graph_mode(BigValueGraphMode.NONE if self.legend else BigValueGraphMode.AREA)
            .text_mode(BigValueTextMode.NAME if self.legend else BigValueTextMode.AUTO)
            .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
            .thresholds(build.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([Threshold(color="green"), *red]))
            .targets([*_make_targets({self.legend: self.query})])
        )


@dataclass(frozen=True)
class InfoTable:
    """A table of an info metric's labels: one row per strategy, or one row per label."""

    title: str
    family: MetricFamily[Info]
    height: int
    width: int = 12

    def build(self) -> TablePanel:
        query = select(self.family)
        target = Dataquery().datasource(PROMETHEUS).ref_id("A").expr(query).legend_format("").instant()
        if STRATEGY in self.family.labels:
            hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
            transformation = DataTransformerConfig(
                id_val="organize", options={"excludeByName": hidden, "indexByName": {STRATEGY.name: 0}}
            )
            target.format(PromQueryFormat.TABLE)
        else:
            transformation = DataTransformerConfig(id_val="labelsToFields", options={"mode": "rows"})
            target.format(PromQueryFormat.TIME_SERIES)
        return (
            TablePanel()
            .title(self.title)
            .description(_describe({"": query}))
            .datasource(PROMETHEUS)
            .unit("short")
            .span(self.width)
            .height(self.height)
            .show_header(True)
            .targets([target])
            .with_transformation(transformation)
        )


Rows = Mapping[str, Sequence[Graph | Stat | InfoTable]]  # by title


def build_dashboard(key: str, title: str, about: str, rows: Rows) -> Dashboard:
    """Build a dashboard of rows of panels, with variables for server and strategy; its uid is `kvmux-{key}`."""
    dashboard = (
        build.Dashboard(f"kvmux: {title}")
        .uid(f"{TAG}-{key}")
        .description(about)
        .tags([TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("10s")
        .link(
            build.DashboardLink("kvmux")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_make_variable(SERVER_VARIABLE, "Server", STEPS, SERVER))
        .with_variable(_make_variable(STRATEGY_VARIABLE, "Strategy", KV_LIMIT, STRATEGY))
    )
    ids = itertools.count(1)
    for row, panels in rows.items():
        dashboard.with_row(build.Row(row).id(next(ids)))
        for panel in panels:
            dashboard.with_panel(panel.build().id(next(ids)))
    return dashboard.build()


def _make_variable(name: str, label: str, family: MetricFamily[Any], of: Label) -> build.QueryVariable:
    """Make a variable to choose values of the label `of`, by default all that the metric has."""
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query({"query": f"label_values({family.exposed_name}, {of.name})", "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _make_targets(queries: Mapping[str, str]) -> list[Dataquery]:
    """Return the queries as targets, each with a letter, as in Grafana's editor."""
    assert len(queries) <= len(ascii_uppercase), "a panel has at most 26 queries"
    return [
        Dataquery().datasource(PROMETHEUS).ref_id(letter).expr(query).legend_format(legend).range()
        for letter, (legend, query) in zip(ascii_uppercase, queries.items(), strict=False)
    ]


def _describe(queries: Mapping[str, str], note: str = "") -> str:
    """Return the note and the help texts of all metrics in the queries."""
    families = find_families(" ".join(queries.values()))
    return "\n\n".join([*([note] if note else []), *(f"`{family.exposed_name}`: {family.help}" for family in families)])
