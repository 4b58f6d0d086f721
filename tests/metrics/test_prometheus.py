"""A real Prometheus reads the metrics and answers every query of every dashboard, with what had happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from server.metrics.families import FAMILIES
from tests.metrics.fake_metrics import INSTANCES
from tests.metrics.metrics_server import new_busy_metrics, observe_everything, serve_metrics
from tests.metrics.prometheus_server import Prometheus, running_prometheus
from tools.dashboards.catalogue import Query, iter_queries
from tools.dashboards.promql import fill_variables

QUERIES = list(iter_queries())


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped changing metrics; queries are for a moment after the last change.

    So a late or missing scrape on a busy machine does not matter.
    """
    metrics = new_busy_metrics(settings={"vllm_metric_names": True})
    with serve_metrics(metrics) as target, running_prometheus(tmp_path_factory.mktemp("prometheus"), target) as started:
        started.wait_for_scrapes(1)
        for _ in range(3):
            observe_everything(metrics)
        started.wait_for_scrapes(2)
        started.wait(lambda: bool(started.query("vllm:num_requests_running > 0 and on() up == 1")), "vLLM's names")
        yield replace(started, moment=time.time())


def ask(prometheus: Prometheus, panel: str, dashboard: str) -> dict[str, float]:
    """Return the values in a panel, by the values of their labels, or by the legend if it names no label."""
    return {
        " ".join(labels.values()) or query.legend: value
        for query in QUERIES
        if (query.dashboard, query.panel) == (dashboard, panel)
        for labels, value in prometheus.query(fill_variables(query.expression))
    }


def ask_by_legend(prometheus: Prometheus, panel: str) -> dict[str, set[float]]:
    """Return the values in a panel of the strategies' dashboard, rounded, by the legends of its queries."""
    return {
        query.legend: {round(value, 6) for _, value in prometheus.query(fill_variables(query.expression))}
        for query in QUERIES
        if (query.dashboard, query.panel) == ("kvmux-strategies", panel)
    }


@pytest.mark.parametrize("query", [pytest.param(q, id=f"{q.dashboard}: {q.panel}: {q.legend}") for q in QUERIES])
def test_every_query_has_an_answer(prometheus: Prometheus, query: Query) -> None:
    answer = prometheus.query(fill_variables(query.expression))
    assert answer
    assert all(value == value for _, value in answer), "not a number"


def test_panels_show_what_happened(prometheus: Prometheus) -> None:
    assert ask(prometheus, "Prefix cache hit rate", "kvmux-strategies") == dict.fromkeys(INSTANCES, pytest.approx(0.6))
    assert ask(prometheus, "Error rate", "kvmux-overview")[""] == pytest.approx(0.25), "one outcome of four"
    assert ask(prometheus, "Running requests", "kvmux-overview") == {"": 2 * len(INSTANCES)}
    assert ask(prometheus, "Running requests", "kvmux-strategies") == dict.fromkeys(INSTANCES, 2)
    assert ask(prometheus, "KV memory in use", "kvmux-strategies") == dict.fromkeys(INSTANCES, 300)
    assert ask(prometheus, "KV memory by state", "kvmux-memory") == {"used": 600, "idle": 400, "wasted": 200}
    assert ask(prometheus, "Max KV usage", "kvmux-overview") == {"": pytest.approx(0.3)}
    of_a_draft = "Accepted tokens per draft, mean"
    assert ask(prometheus, of_a_draft, "kvmux-strategies") == dict.fromkeys(INSTANCES, pytest.approx(2))
    accepted = ask(prometheus, "Acceptance rate by position", "kvmux-strategies")
    assert [accepted[position] for position in "0123"] == [1, 0.5, 0.5, 0]
    steps = ask(prometheus, "Batch size of a step, mean", "kvmux-engine")
    assert steps == {"sequences": pytest.approx(8), "tokens": pytest.approx(80)}
    ops = ask(prometheus, "Step time by operation", "kvmux-engine")
    assert ops.pop("other") == pytest.approx(0.01)
    assert sum(ops.values()) == pytest.approx(0.01)
    assert ask(prometheus, "Blocks by state", "kvmux-memory") == {
        "in_use": 10,
        "shared": 4,
        "pending": 2,
        "pinned": 2,
        "idle": 6,
    }
    kept = "Kept tokens, and the budgets of running sequences"
    assert ask_by_legend(prometheus, kept) == {"{{strategy}} kept": {70}, "{{strategy}} budgets": {2 * 40}}
    times = ask_by_legend(prometheus, "Time of a compaction, p50 and p99")
    assert times == {"{{strategy}} p50": {0.002}, "{{strategy}} p99": {0.0099}}
    share = ask(prometheus, "Share of the steps' time that compactions take", "kvmux-strategies")
    assert share == dict.fromkeys(INSTANCES, pytest.approx(0.0095 / 0.02))
    compactions = ask(prometheus, "Compactions", "kvmux-strategies")
    dropped = ask(prometheus, "Tokens dropped by compactions", "kvmux-strategies")
    assert dropped == {name: pytest.approx(20 * rate) for name, rate in compactions.items()}, "40 tokens by two"
    (slow,) = set(ask(prometheus, "Inter-token latency, p95", "kvmux-strategies").values())
    assert 0.025 <= slow <= 0.05, "the bucket of the slower one"


def test_rates_are_a_second(prometheus: Prometheus) -> None:
    outcomes = ask(prometheus, "Finished requests by outcome", "kvmux-overview")
    assert len(set(outcomes.values())) == 1
    growth = prometheus.value("sum(increase(kvmux_requests_total[1m]))")
    assert sum(outcomes.values()) == pytest.approx(growth / 60, rel=0.2)


def test_rules_are_evaluated_without_errors(prometheus: Prometheus) -> None:
    prometheus.wait(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "the rules")
    assert {(rule["name"], rule.get("lastError")) for rule in prometheus.rules() if rule["health"] != "ok"} == set()


def test_every_metric_of_vllms_is_there(prometheus: Prometheus) -> None:
    for family in FAMILIES:
        for series in family.series_names if family.vllm_name else ():
            name = f"vllm:{family.vllm_name}{series.removeprefix(family.exposed_name)}"
            assert prometheus.query(name), name


def test_vllms_labels_are_theirs(prometheus: Prometheus) -> None:
    finished = prometheus.query('vllm:request_success_total{model_name="paged"}')
    assert {labels["finished_reason"] for labels, _ in finished} == {"stop", "length", "abort", "error"}
    assert not [labels for labels, _ in finished if "outcome" in labels]
    assert prometheus.value('vllm:num_requests_waiting{model_name="paged"}') == 3 * 4, "for whatever reason"
    assert prometheus.query("histogram_quantile(0.5, rate(vllm:iteration_tokens_total_bucket[1m]))")
