"""All dashboards, what they look like as files, and every query in them. Knows no metric and no panel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from grafana_foundation_sdk.models.prometheus import Dataquery

from tools.dashboards.engine import engine
from tools.dashboards.memory import memory
from tools.dashboards.overview import overview
from tools.dashboards.strategies import strategies

FOLDER = Path(__file__).parents[2] / "config" / "grafana" / "dashboards"


class Query(NamedTuple):
    """A line, or several, of a panel."""

    dashboard: str
    panel: str
    legend: str
    expression: str  # with Grafana's variables, see `promql.filled`


def dashboards() -> list[Dashboard]:
    return [overview(), strategies(), memory(), engine()]


def queries() -> Iterator[Query]:
    """Everything that any dashboard asks Prometheus."""
    for dashboard in dashboards():
        for panel in panels(dashboard):
            for target in targets(panel):
                yield Query(dashboard.uid or "", panel.title or "", target.legend_format or "", target.expr or "")


def panels(dashboard: Dashboard) -> list[Panel]:
    """Without the titles of rows."""
    return [panel for panel in dashboard.panels or () if isinstance(panel, Panel)]


def targets(panel: Panel) -> list[Dataquery]:
    return [target for target in panel.targets or () if isinstance(target, Dataquery)]


def files() -> dict[Path, str]:
    """Each dashboard as Grafana reads it, by where it lies."""
    return {
        FOLDER / f"{dashboard.uid}.json": json.dumps(dashboard, cls=JSONEncoder, indent=2) + "\n"
        for dashboard in dashboards()
    }
