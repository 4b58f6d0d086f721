"""The dashboards in config/grafana are those of the code, show every metric, and are what Grafana reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, VariableModel

from server.metrics.families import FAMILIES, KV_STATE, OUTCOME, REQUESTS, STEPS, STRATEGY
from tools.dashboards import promql
from tools.dashboards.catalogue import FOLDER, get_panels, get_targets, iter_queries, render_files
from tools.dashboards.tables import build_dashboards

DASHBOARDS = build_dashboards()
every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


def all_panels() -> Iterator[tuple[str, Panel]]:
    for dashboard in DASHBOARDS:
        for panel in get_panels(dashboard):
            yield f"{dashboard.uid}: {panel.title}", panel


def variables(dashboard: Dashboard) -> dict[str, VariableModel]:
    return {each.name: each for each in (dashboard.templating.list_val if dashboard.templating else None) or ()}


def test_the_files_are_what_the_code_writes() -> None:
    assert {file: file.read_text() for file in FOLDER.iterdir()} == render_files(), "run `python -m tools.dashboards`"


@every_dashboard
def test_grafanas_own_types_read_what_is_written(dashboard: Dashboard) -> None:
    register_default_plugins()
    written = json.dumps(dashboard, cls=JSONEncoder)
    read = Dashboard.from_json(json.loads(written))
    assert json.dumps(read, cls=JSONEncoder) == written


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {family.name for query in iter_queries() for family in promql.find_families(query.expression)}
    assert {family.name for family in FAMILIES} == shown


@every_dashboard
def test_a_dashboard_lets_choose_and_leads_to_the_others(dashboard: Dashboard) -> None:
    assert dashboard.tags == ["kvmux"]
    assert dashboard.refresh
    (link,) = dashboard.links or ()
    assert (link.tags, link.include_vars, link.keep_time) == (["kvmux"], True, True)
    chosen = variables(dashboard)
    assert list(chosen) == ["datasource", "server", "strategy"]
    for name in ("server", "strategy"):
        assert chosen[name].multi
        assert chosen[name].include_all
        assert promql.find_families(str(chosen[name].query))


def test_dashboards_have_different_titles() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len({dashboard.title for dashboard in DASHBOARDS}) == 5


@every_dashboard
def test_no_panel_covers_another(dashboard: Dashboard) -> None:
    placed = [panel.grid_pos for panel in dashboard.panels or () if panel.grid_pos]
    assert len(placed) == len(dashboard.panels or ())
    for one, other in combinations(placed, 2):
        apart_x = one.x + one.w <= other.x or other.x + other.w <= one.x
        apart_y = one.y + one.h <= other.y or other.y + other.h <= one.y
        assert apart_x or apart_y
    assert max(place.x + place.w for place in placed) <= 24
    assert len({panel.id_val for panel in dashboard.panels or ()}) == len(placed)


@pytest.mark.parametrize("panel", [pytest.param(panel, id=name) for name, panel in all_panels()])
def test_a_panel_says_what_it_shows_and_in_what_unit(panel: Panel) -> None:
    assert panel.title
    assert panel.field_config
    assert panel.field_config.defaults.unit
    assert get_targets(panel)
    letters = [target.ref_id for target in get_targets(panel)]
    assert len(set(letters)) == len(letters)
    for target in get_targets(panel):
        for family in promql.find_families(target.expr or ""):
            assert family.help in (panel.description or "")


def test_a_query_chooses_servers_and_strategies() -> None:
    for query in iter_queries():
        assert '{instance=~"$server"' in query.expression
        for family in promql.find_families(query.expression):
            assert STRATEGY not in family.labels or 'strategy=~"$strategy"' in query.expression


def test_legends_name_labels_that_the_query_leaves() -> None:
    for query in iter_queries():
        for label in query.legend.split("{{")[1:]:
            assert label.partition("}}")[0] in query.expression.partition(" by (")[2].partition(")")[0], query


def test_names_of_others_are_refused() -> None:
    with pytest.raises(KeyError, match="kvmux_nothing"):
        promql.find_families("rate(kvmux_nothing_total[5m])")
    with pytest.raises(AssertionError):
        promql.rate(REQUESTS, KV_STATE)
    with pytest.raises(AssertionError):
        promql.rate(REQUESTS, where={OUTCOME: "happy"})


def test_variables_are_filled() -> None:
    assert promql.fill_variables(promql.rate(STEPS), "5m") == 'sum(rate(kvmux_steps_total{instance=~".+"}[5m]))'
    assert not [query for query in iter_queries() if "$" in promql.fill_variables(query.expression)]
