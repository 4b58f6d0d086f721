"""The JSON files of the dashboards, and an iterator over their queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from grafana_foundation_sdk.models.prometheus import Dataquery

from tools.dashboards.tables import build_dashboards

FOLDER = Path(__file__).parents[2] / "config" / "grafana" / "dashboards"


class Query(NamedTuple):
    """A PromQL query of a panel; it may return several lines."""

    dashboard: str
    panel: str
    legend: str
    expression: str  # PromQL with Grafana variables, see `promql.fill_variables`


def iter_queries() -> Iterator[Query]:
    """Yield every query of every dashboard."""
    for dashboard in build_dashboards():
        for panel in get_panels(dashboard):
            for target in get_targets(panel):
                yield Query(dashboard.uid or "", panel.title or "", target.legend_format or "", target.expr or "")


def get_panels(dashboard: Dashboard) -> list[Panel]:
    """Return the panels, without the titles of rows."""
    return [panel for panel in dashboard.panels or () if isinstance(panel, Panel)]


def get_targets(panel: Panel) -> list[Dataquery]:
    return [target for target in panel.targets or () if isinstance(target, Dataquery)]


def render_files() -> dict[Path, str]:
    """Return the JSON text of each dashboard by its file."""
    return {
        FOLDER / f"{dashboard.uid}.json": json.dumps(dashboard, cls=JSONEncoder, indent=2) + "\n"
        for dashboard in build_dashboards()
    }
