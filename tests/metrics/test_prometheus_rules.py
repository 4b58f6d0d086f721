"""Rules and alerts name metrics that exist and pass Prometheus' own checks; every alert has a case that fires it."""

from __future__ import annotations

import re
from typing import Any

import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from server.metrics.families import FAMILIES
from server.metrics.metric_family import PREFIX
from tests.metrics.fake_metrics import INSTANCES, exposition, new_metrics, parse_samples, sample_value
from tests.metrics.metrics_server import BUSY, new_busy_metrics, observe_everything
from tests.metrics.prometheus_server import CONFIG, ROOT, promtool
from tools.dashboards.promql import find_families

ALERTS: list[dict[str, Any]] = yaml.safe_load((CONFIG / "alerts.yml").read_text())["groups"][0]["rules"]
CASES = sorted((CONFIG / "tests").glob("*.yml"))


def test_every_name_of_vllms_stands_for_one_metric() -> None:
    names = [family.vllm_name for family in FAMILIES if family.vllm_name]
    assert len(set(names)) == len(names)


def test_the_server_has_vllms_names_where_a_setting_says_so() -> None:
    metrics = new_metrics(settings={"vllm_metric_names": True})
    observe_everything(metrics)
    told = parse_samples(exposition(metrics, BUSY).decode())
    ours = [(family.vllm_name, family.exposed_name, family.series_names) for family in FAMILIES if family.vllm_name]
    assert {name for name, _ in told if name.startswith("vllm:")} == {
        f"vllm:{theirs}{series.removeprefix(name)}" for theirs, name, all_series in ours for series in all_series
    }
    in_openmetrics = openmetrics_families(exposition(metrics, BUSY, openmetrics=True).decode())
    assert {sample.name for family in in_openmetrics for sample in family.samples} == {name for name, _ in told}
    outcomes = {"cancelled": "abort", "stop": "stop", "length": "length", "error": "error"}
    for name in INSTANCES:
        by = {"strategy": name, "model_name": name}
        assert sample_value(told, "vllm:num_requests_waiting", **by) == 3 * 4, "for whatever reason"
        for ours, theirs in outcomes.items():
            finished = sample_value(told, "vllm:request_success_total", **by, finished_reason=theirs)
            assert finished == sample_value(told, f"{PREFIX}requests_total", strategy=name, outcome=ours) == 1
        for rest in ({"le": "0.025"}, {"le": "+Inf"}):
            latency = sample_value(told, "vllm:inter_token_latency_seconds_bucket", **by, **rest)
            assert (
                latency == sample_value(told, f"{PREFIX}inter_token_latency_seconds_bucket", strategy=name, **rest) > 0
            )
    assert (
        sample_value(told, "vllm:iteration_tokens_total_count") == sample_value(told, f"{PREFIX}step_tokens_count") == 1
    )
    assert not [name for name, _ in parse_samples(exposition(new_metrics()).decode()) if name.startswith("vllm:")]


def test_alerts_ask_for_metrics_that_exist() -> None:
    known = {family.exposed_name for family in FAMILIES}
    for alert in ALERTS:
        assert find_families(alert["expr"]) or "up{" in alert["expr"], alert["alert"]
        for text in alert["annotations"].values():
            assert set(re.findall(rf"{PREFIX}\w+", text)) <= known


def test_alerts_say_what_to_do() -> None:
    for alert in ALERTS:
        assert alert["alert"].startswith("Kvmux")
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description"}


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_none_does() -> None:
    fired = set()
    for file in CASES:
        for case in yaml.safe_load(file.read_text())["tests"]:
            expected = [
                {
                    name
                    for sample in moment["exp_samples"]
                    for name in re.findall(r'alertname="(\w+)"', sample["labels"])
                }
                for moment in case["promql_expr_test"]
            ]
            assert set() in expected, case["name"]
            fired |= set.union(*expected)
    assert fired == {alert["alert"] for alert in ALERTS}


def test_the_document_has_every_alert() -> None:
    document = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for alert in ALERTS:
        assert f"| `{alert['alert']}` | {alert['labels']['severity']} |" in document


def test_prometheus_accepts_configuration_and_rules() -> None:
    result = promtool("check", "config", CONFIG / "prometheus.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_fire_when_they_should() -> None:
    result = promtool("test", "rules", *CASES)
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_has_nothing_to_say_about_the_exposition() -> None:
    metrics = new_busy_metrics()
    observe_everything(metrics)
    result = promtool("check", "metrics", text=exposition(metrics, BUSY).decode())
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
