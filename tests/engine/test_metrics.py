"""The exposition is well-formed and says exactly what happened, by strategy, from zero on."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from cache_strategies.base import Usage
from server.engine.report import Admission, RequestRecord, StepPart, StepReport
from server.metrics.families import FAMILIES, KV_STATE, OUTCOME, STRATEGY, WAIT, table
from server.metrics.registry import Metrics
from tests.engine.driving import Driver
from tests.engine.reference import random_prompt

INSTANCES = ("paged", "contiguous")
EMPTY = Usage(0, 0, 0, 0, 0, 0, 0)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

OUTCOMES, KV_STATES = OUTCOME.values or (), KV_STATE.values or ()
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def scrape(metrics: Metrics, **usage: Usage) -> Samples:
    text = metrics.exposition(dict.fromkeys(INSTANCES, EMPTY) | usage).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def record(instance: str = "paged", outcome: str = "stop", **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "instance": instance,
        "reason": "default",
        "outcome": outcome,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "miss": "cold",
        "forked": False,
        "generated_tokens": 5,
        "preemptions": 0,
        "kv_bytes": 1000,
        "queue_seconds": 0.001,
        "prefill_seconds": 0.1,
        "decode_seconds": 0.4,
        "first_token_seconds": 0.101,
        "total_seconds": 0.6,
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def step(**changes: object) -> StepReport:
    values: dict[str, object] = {
        "seconds": 0.02,
        "parts": {},
        "preempted": {},
        "failures": {},
        "forked": {},
        "admitted": [],
        "evicted": {},
        "running": {},
        "waiting": {},
        "gaps": {},
    }
    return StepReport(**(values | changes))  # type: ignore[arg-type]


def test_every_strategy_starts_at_zero_in_every_metric() -> None:
    samples = scrape(Metrics(INSTANCES))
    for family in FAMILIES:
        if STRATEGY in family.labels:
            name = f"{family.exposed}_count" if family.edges else family.exposed
            shown = {dict(labels)["strategy"] for sample, labels in samples if sample == name}
            assert shown == set(INSTANCES), name
    for instance in INSTANCES:
        for outcome in OUTCOMES:
            assert at(samples, "kvmux_requests_total", strategy=instance, outcome=outcome) == 0
        for state in KV_STATES:
            assert at(samples, "kvmux_kv_cache_bytes", strategy=instance, state=state) == 0
    assert at(samples, "kvmux_steps_total") == 0
    assert {value for (name, _), value in samples.items() if not name.endswith("_created")} == {0}


def test_names_end_as_their_kind_and_unit_demand() -> None:
    text = Metrics(INSTANCES).exposition(dict.fromkeys(INSTANCES, EMPTY)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("kvmux_")
        assert family.documentation
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert f"{family.name}_total" in names
        elif family.type == "gauge":
            assert names <= {family.name}
            assert not family.name.endswith("_total")
        else:
            assert family.type == "histogram"
            assert family.name.endswith(("_seconds", "_rows", "_tokens"))
            assert {f"{family.name}_{part}" for part in ("bucket", "count", "sum")} <= names


def test_a_request_counts_once_under_its_strategy_and_outcome() -> None:
    metrics = Metrics(INSTANCES)
    before = scrape(metrics)
    metrics.observe_request(record())
    after = scrape(metrics)
    grown = {
        name: after[name, labels] - before[name, labels]
        for name, labels in before
        if after[name, labels] != before[name, labels] and not name.endswith(("_bucket", "_sum", "_created"))
    }
    assert grown == {
        "kvmux_requests_total": 1,
        "kvmux_e2e_request_latency_seconds_count": 1,
        "kvmux_request_queue_time_seconds_count": 1,
        "kvmux_request_prefill_time_seconds_count": 1,
        "kvmux_request_decode_time_seconds_count": 1,
        "kvmux_time_to_first_token_seconds_count": 1,
        "kvmux_request_time_per_output_token_seconds_count": 1,
    }
    assert at(after, "kvmux_request_time_per_output_token_seconds_sum", strategy="paged") == pytest.approx(0.1)
    changed = {labels for (name, labels), value in after.items() if before[name, labels] != value}
    assert all(dict(labels)["strategy"] == "paged" for labels in changed)


@pytest.mark.parametrize(
    ("admission", "queries", "hits", "misses"),
    [
        (Admission("paged", 30, 16, "cold", forked=False), 30, 16, {"cold": 14}),
        (Admission("paged", 30, 29, None, forked=False), 30, 29, {"short": 1}),  # the last is always computed
        (Admission("paged", 30, 30, None, forked=True), 0, 0, {}),  # nobody looked
    ],
)
def test_a_prompt_counts_when_it_is_admitted(
    admission: Admission, queries: int, hits: int, misses: dict[str, int]
) -> None:
    metrics = Metrics(INSTANCES)
    metrics.observe_step(step(admitted=[admission]))
    samples = scrape(metrics)
    assert at(samples, "kvmux_prompt_tokens_total", strategy="paged") == 30
    assert at(samples, "kvmux_prompt_tokens_cached_total", strategy="paged") == admission.cached_tokens
    assert at(samples, "kvmux_prefix_cache_queries_total", strategy="paged") == queries
    assert at(samples, "kvmux_prefix_cache_hits_total", strategy="paged") == hits
    found = {
        dict(labels)["reason"]: value
        for (name, labels), value in samples.items()
        if name == "kvmux_prefix_cache_misses_total" and value
    }
    assert found == misses


def test_openmetrics_says_the_same() -> None:
    metrics = Metrics(INSTANCES)
    metrics.observe_request(record())
    usage = dict.fromkeys(INSTANCES, EMPTY)
    theirs = openmetrics_families(metrics.exposition(usage, openmetrics=True).decode())
    found = {(s.name, frozenset(s.labels.items())): s.value for family in theirs for s in family.samples}
    assert found == scrape(metrics)


def test_the_document_has_every_metric() -> None:
    assert table() in DOCUMENT, "run `python -m server.metrics.families`"


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_times_that_did_not_come_about_are_not_observed(outcome: str) -> None:
    metrics = Metrics(INSTANCES)
    never = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds", "first_token_seconds"))
    metrics.observe_request(record("contiguous", outcome, generated_tokens=0, **never))
    samples = scrape(metrics)
    assert at(samples, "kvmux_requests_total", strategy="contiguous", outcome=outcome) == 1
    assert at(samples, "kvmux_e2e_request_latency_seconds_count", strategy="contiguous") == 1
    for what in ("queue_time", "prefill_time", "decode_time", "time_per_output_token"):
        assert at(samples, f"kvmux_request_{what}_seconds_count", strategy="contiguous") == 0


def test_one_token_has_no_time_between_tokens() -> None:
    metrics = Metrics(INSTANCES)
    metrics.observe_request(record(generated_tokens=1, decode_seconds=0.0))
    assert at(scrape(metrics), "kvmux_request_time_per_output_token_seconds_count", strategy="paged") == 0


def test_a_step_counts_what_it_computed() -> None:
    metrics = Metrics(INSTANCES)
    parts = {"paged": StepPart(3, 1, 40, 4), "contiguous": StepPart(0, 2, 100, 0)}
    metrics.observe_step(step(parts=parts, preempted={"paged": 2}, failures={"contiguous": 1}))
    samples = scrape(metrics)
    assert at(samples, "kvmux_steps_total") == 1
    assert (at(samples, "kvmux_step_rows_sum"), at(samples, "kvmux_step_tokens_sum")) == (6, 140)
    assert at(samples, "kvmux_step_seconds_sum") == pytest.approx(0.02)
    for name, paged, contiguous in (
        ("kvmux_generation_tokens_total", 4, 0),
        ("kvmux_num_preemptions_total", 2, 0),
        ("kvmux_strategy_failures_total", 0, 1),
    ):
        assert at(samples, name, strategy="paged") == paged
        assert at(samples, name, strategy="contiguous") == contiguous


def test_an_idle_step_is_no_step_but_its_gauges_count() -> None:
    metrics = Metrics(INSTANCES)
    metrics.observe_step(step(running={"paged": 2}, waiting={("paged", "memory"): 1, ("contiguous", "seats"): 5}))
    samples = scrape(metrics)
    assert at(samples, "kvmux_steps_total") == at(samples, "kvmux_step_rows_count") == 0
    assert at(samples, "kvmux_num_requests_running", strategy="paged") == 2
    assert at(samples, "kvmux_num_requests_waiting", strategy="contiguous", reason="seats") == 5
    metrics.observe_step(step())
    samples = scrape(metrics)
    for instance in INSTANCES:
        assert at(samples, "kvmux_num_requests_running", strategy=instance) == 0
        for reason in WAIT.values or ():
            assert at(samples, "kvmux_num_requests_waiting", strategy=instance, reason=reason) == 0


def test_memory_is_as_it_is_now() -> None:
    metrics = Metrics(INSTANCES)
    samples = scrape(metrics, paged=Usage(2, 50, 600, 300, 200, 100, 1000))
    figures = {state: at(samples, "kvmux_kv_cache_bytes", strategy="paged", state=state) for state in KV_STATES}
    assert figures == {"used": 300, "idle": 200, "wasted": 100}
    assert at(samples, "kvmux_kv_cache_limit_bytes", strategy="paged") == 1000
    assert at(samples, "kvmux_kv_cache_usage_ratio", strategy="paged") == pytest.approx(0.3)
    assert at(scrape(metrics), "kvmux_kv_cache_usage_ratio", strategy="paged") == 0, "a limit of 0 divides nothing"


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = Metrics(INSTANCES), Metrics(INSTANCES)
    one.observe_request(record())
    assert at(scrape(other), "kvmux_requests_total", strategy="paged", outcome="stop") == 0


def test_an_engine_and_its_metrics_agree_on_what_was_sent(tiny: Path) -> None:
    driver = Driver(tiny, max_num_seqs=3)
    metrics = Metrics(list(driver.core.caches))
    prompts = {"paged": 5, "contiguous": 20, "sliding_window": 33}
    for instance, length in prompts.items():
        for i in range(2):
            driver.submit(f"{instance} {i}", random_prompt(length), 4 + i, kv_cache=instance)
    driver.submit("gone", random_prompt(9), 4, kv_cache="paged")
    driver.cancel("gone")
    driver.run()
    driver.step()
    for result in driver.steps:
        metrics.observe_step(result.report)
        for finished in result.finished:
            metrics.observe_request(finished)
    samples = scrape(metrics, **{name: cache.usage() for name, cache in driver.core.caches.items()})
    for instance, length in prompts.items():
        gone = 9 * (instance == "paged")
        assert at(samples, "kvmux_requests_total", strategy=instance, outcome="length") == 2
        assert at(samples, "kvmux_requests_total", strategy=instance, outcome="cancelled") == bool(gone)
        assert at(samples, "kvmux_prompt_tokens_total", strategy=instance) == 2 * length, "nobody was computed in vain"
        assert at(samples, "kvmux_generation_tokens_total", strategy=instance) == 9
        assert at(samples, "kvmux_inter_token_latency_seconds_count", strategy=instance) == 9 - 2
        assert at(samples, "kvmux_num_requests_running", strategy=instance) == 0
        assert at(samples, "kvmux_kv_cache_bytes", strategy=instance, state="used") == 0
    assert at(samples, "kvmux_step_tokens_sum") == sum(result.report.tokens for result in driver.steps)
