"""The exposition is well-formed and counts exactly what happened, by strategy, from zero."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from cache_strategies.types import BlockEvents, Blocks, CacheUsage
from config.settings import MAX_DRAFT_TOKENS
from server.engine.info import make_engine_info, read_engine_state
from server.metrics.families import FAMILIES, KV_STATE, OUTCOME, STRATEGY, WAIT_REASON
from server.metrics.metric_family import format_table
from server.metrics.registry import Metrics
from server.records import Admission, Compaction, DeviceMemory, DraftRecord, GrammarEvents, KVTokens, StepPart
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import random_prompt
from tests.metrics.fake_metrics import (
    EMPTY,
    INSTANCES,
    exposition,
    fake_record,
    fake_state,
    fake_step,
    labels_of,
    new_metrics,
    sample_value,
    scrape,
)

OUTCOMES, KV_STATES = OUTCOME.values or (), KV_STATE.values or ()
DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()


def test_every_strategy_starts_at_zero_in_every_metric() -> None:
    samples = scrape(new_metrics())
    for family in FAMILIES:
        if STRATEGY in family.labels:
            name = f"{family.exposed_name}_count" if family.buckets else family.exposed_name
            assert {labels["strategy"] for labels in labels_of(samples, name)} == set(INSTANCES), name
    for instance in INSTANCES:
        for outcome in OUTCOMES:
            assert sample_value(samples, "kvmux_requests_total", strategy=instance, outcome=outcome) == 0
        for held in KV_STATES:
            assert sample_value(samples, "kvmux_kv_cache_bytes", strategy=instance, state=held) == 0
    assert sample_value(samples, "kvmux_steps_total") == 0
    assert {value for (name, _), value in samples.items() if not name.endswith("_info")} == {0}


def test_names_end_as_their_kind_and_unit_demand() -> None:
    state = fake_state(shadow_pairs=[INSTANCES], rollouts={"int8": ("shadow", 0.0)})
    text = exposition(new_metrics(), state).decode()
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
            parts = {"histogram": ("bucket", "count", "sum"), "summary": ("count", "sum")}[family.type]
            assert family.name.endswith(("_seconds", "_rows", "_tokens", "_nats"))
            assert {f"{family.name}_{part}" for part in parts} <= names


def test_a_request_counts_once_under_its_strategy_and_outcome() -> None:
    metrics = new_metrics()
    before = scrape(metrics)
    metrics.observe_request(fake_record())
    after = scrape(metrics)
    grown = {
        name: after[name, labels] - before[name, labels]
        for name, labels in before
        if after[name, labels] != before[name, labels] and not name.endswith(("_bucket", "_sum"))
    }
    assert grown == {
        "kvmux_requests_total": 1,
        "kvmux_e2e_request_latency_seconds_count": 1,
        "kvmux_request_queue_time_seconds_count": 1,
        "kvmux_request_prefill_time_seconds_count": 1,
        "kvmux_request_decode_time_seconds_count": 1,
        "kvmux_time_to_first_token_seconds_count": 1,
        "kvmux_request_time_per_output_token_seconds_count": 1,
        "kvmux_request_prompt_tokens_count": 1,
        "kvmux_request_generation_tokens_count": 1,
    }
    assert sample_value(after, "kvmux_request_time_per_output_token_seconds_sum", strategy="paged") == pytest.approx(
        0.1
    )
    changed = {labels for (name, labels), value in after.items() if before[name, labels] != value}
    assert all(dict(labels)["strategy"] == "paged" for labels in changed)


def test_tokens_that_were_dropped_count_when_their_request_leaves() -> None:
    metrics = new_metrics()
    for instance, outcome, dropped in (("paged", "stop", 3), ("paged", "cancelled", 4), ("contiguous", "length", 0)):
        metrics.observe_request(fake_record(instance, outcome, dropped_tokens=dropped))
    samples = scrape(metrics)
    for instance, dropped in (("paged", 7), ("contiguous", 0)):
        assert sample_value(samples, "kvmux_kv_cache_dropped_tokens_total", strategy=instance) == dropped


def test_a_request_that_a_fallback_served_counts_under_both_strategies() -> None:
    metrics = new_metrics()
    for record in (fake_record("paged", fallback_of="contiguous"), fake_record("paged"), fake_record("contiguous")):
        metrics.observe_request(record)
    samples, name = scrape(metrics), "kvmux_fallback_requests_total"
    assert sample_value(samples, name, strategy="contiguous", fallback="paged") == 1
    assert sum(value for (sample, _), value in samples.items() if sample == name) == 1
    assert not any(labels["strategy"] == labels["fallback"] for labels in labels_of(samples, name))


def test_compactions_count_with_their_tokens_and_times() -> None:
    metrics = new_metrics()
    for compactions in ([Compaction(0.0004, 3), Compaction(0.003, 0)], [Compaction(5.0, 40)]):
        metrics.observe_step(fake_step(compactions={"paged": compactions}))
    samples = scrape(metrics)
    name = "kvmux_kv_cache_compaction_seconds"
    for instance, count, tokens, seconds in (("paged", 3, 43, 5.0034), ("contiguous", 0, 0, 0.0)):
        assert sample_value(samples, "kvmux_kv_cache_compactions_total", strategy=instance) == count
        assert sample_value(samples, "kvmux_kv_cache_compacted_tokens_total", strategy=instance) == tokens
        assert sample_value(samples, f"{name}_count", strategy=instance) == count
        assert sample_value(samples, f"{name}_sum", strategy=instance) == pytest.approx(seconds)
    for edge, count in (("0.0005", 1), ("0.002", 1), ("0.005", 2), ("2.0", 2), ("+Inf", 3)):
        assert sample_value(samples, f"{name}_bucket", strategy="paged", le=edge) == count, edge


def test_a_disabled_instance_has_all_series_and_one_fault() -> None:
    samples = scrape(new_metrics(disabled=["hung"]))
    for family in FAMILIES:
        if STRATEGY in family.labels:
            name = f"{family.exposed_name}_count" if family.buckets else family.exposed_name
            assert {labels["strategy"] for labels in labels_of(samples, name)} == {*INSTANCES, "hung"}, name
    assert {name: value for (name, labels), value in samples.items() if ("strategy", "hung") in labels and value} == {
        "kvmux_strategy_disabled": 1,
        "kvmux_strategy_failures_total": 1,
        "kvmux_strategy_info": 1,
    }


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
    metrics = new_metrics()
    metrics.observe_step(fake_step(admissions=[admission]))
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_prompt_tokens_total", strategy="paged") == 30
    assert sample_value(samples, "kvmux_prompt_tokens_cached_total", strategy="paged") == admission.cached_tokens
    assert sample_value(samples, "kvmux_prefix_cache_queries_total", strategy="paged") == queries
    assert sample_value(samples, "kvmux_prefix_cache_hits_total", strategy="paged") == hits
    found = {
        dict(labels)["reason"]: value
        for (name, labels), value in samples.items()
        if name == "kvmux_prefix_cache_misses_total" and value
    }
    assert found == misses


def test_openmetrics_says_the_same() -> None:
    metrics = new_metrics()
    metrics.observe_request(fake_record())
    theirs = openmetrics_families(exposition(metrics, openmetrics=True).decode())
    found = {(s.name, frozenset(s.labels.items())): s.value for family in theirs for s in family.samples}
    assert found == scrape(metrics)


def test_the_document_has_every_metric() -> None:
    assert format_table(FAMILIES) in DOCUMENT, "run `python -m server.metrics.families`"


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_times_that_did_not_come_about_are_not_observed(outcome: str) -> None:
    metrics = new_metrics()
    never = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds", "first_token_seconds"))
    metrics.observe_request(fake_record("contiguous", outcome, generated_tokens=0, **never))
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_requests_total", strategy="contiguous", outcome=outcome) == 1
    assert sample_value(samples, "kvmux_e2e_request_latency_seconds_count", strategy="contiguous") == 1
    for what in ("queue_time", "prefill_time", "decode_time", "time_per_output_token"):
        assert sample_value(samples, f"kvmux_request_{what}_seconds_count", strategy="contiguous") == 0


def test_one_token_has_no_time_between_tokens() -> None:
    metrics = new_metrics()
    metrics.observe_request(fake_record(generated_tokens=1, decode_seconds=0.0))
    assert sample_value(scrape(metrics), "kvmux_request_time_per_output_token_seconds_count", strategy="paged") == 0


def test_a_step_counts_what_it_computed() -> None:
    metrics = new_metrics()
    parts = {"paged": StepPart(3, 1, 40), "contiguous": StepPart(0, 2, 100)}
    metrics.observe_step(
        fake_step(parts=parts, generated_tokens={"paged": 4}, preemptions={"paged": 2}, failures={"contiguous": 1})
    )
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_steps_total") == 1
    assert (sample_value(samples, "kvmux_step_rows_sum"), sample_value(samples, "kvmux_step_tokens_sum")) == (6, 140)
    assert sample_value(samples, "kvmux_step_seconds_sum") == pytest.approx(0.02)
    for name, paged, contiguous in (
        ("kvmux_generation_tokens_total", 4, 0),
        ("kvmux_num_preemptions_total", 2, 0),
        ("kvmux_strategy_failures_total", 0, 1),
    ):
        assert sample_value(samples, name, strategy="paged") == paged
        assert sample_value(samples, name, strategy="contiguous") == contiguous


def test_an_idle_step_is_no_step() -> None:
    metrics = new_metrics()
    metrics.observe_step(fake_step())
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_steps_total") == sample_value(samples, "kvmux_step_rows_count") == 0


def test_gauges_are_as_it_is_now() -> None:
    metrics = new_metrics()
    samples = scrape(
        metrics,
        fake_state(
            running={"paged": 2},
            waiting={("paged", "memory"): 1, ("contiguous", "seats"): 5},
            usage={"paged": CacheUsage(2, 50, 600, 300, 200, 100, 1000), "contiguous": EMPTY},
            tokens={"paged": KVTokens(40, 10), "contiguous": KVTokens(0, 0)},
            budget_tokens={"paged": 300, "contiguous": 512},
            blocks={"paged": Blocks(6, 3, 2, 1, 4), "contiguous": Blocks()},
            floor_bytes={"paged": 77, "contiguous": 0},
            pool_warm=400,
            pool_held=600,
            pool_cold=70,
            device_memory=DeviceMemory(30, 70),
            process_memory={"engine": 5, "api": 6, "supervisor": 7},
        ),
    )
    assert sample_value(samples, "kvmux_num_requests_running", strategy="paged") == 2
    assert sample_value(samples, "kvmux_num_requests_waiting", strategy="contiguous", reason="seats") == 5
    for name, label, expected in (
        ("kv_cache_bytes", "state", {"used": 300, "idle": 200, "wasted": 100}),
        ("kv_cache_tokens", "state", {"kept": 40, "dropped": 10}),
        ("kv_cache_blocks", "state", {"in_use": 6, "shared": 3, "pending": 2, "pinned": 1, "idle": 4}),
        ("num_requests_waiting", "reason", {"memory": 1, "seats": 0, "turn": 0, "sibling": 0}),
    ):
        assert {
            labels[label]: sample_value(samples, f"kvmux_{name}", **labels)
            for labels in labels_of(samples, f"kvmux_{name}")
            if labels["strategy"] == "paged"
        } == expected
    for name, label, expected in (
        ("kv_cache_pool_bytes", "state", {"held": 600, "warm": 400, "cold": 70}),
        ("device_memory_bytes", "state", {"used": 30, "free": 70}),
        ("process_resident_memory_bytes", "role", {"engine": 5, "api": 6, "supervisor": 7}),
    ):
        assert {value: sample_value(samples, f"kvmux_{name}", **{label: value}) for value in expected} == expected
    assert sample_value(samples, "kvmux_kv_cache_limit_bytes", strategy="paged") == 1000
    assert sample_value(samples, "kvmux_kv_cache_budget_tokens", strategy="paged") == 300
    assert sample_value(samples, "kvmux_kv_cache_floor_bytes", strategy="paged") == 77
    assert sample_value(samples, "kvmux_kv_cache_usage_ratio", strategy="paged") == pytest.approx(0.3)
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_kv_cache_usage_ratio", strategy="paged") == 0, "a limit of 0 divides nothing"
    for instance in INSTANCES:
        assert sample_value(samples, "kvmux_num_requests_running", strategy=instance) == 0
        for reason in WAIT_REASON.values or ():
            assert sample_value(samples, "kvmux_num_requests_waiting", strategy=instance, reason=reason) == 0


def test_what_happened_to_blocks_is_counted() -> None:
    metrics = new_metrics()
    metrics.observe_step(fake_step(block_events={"paged": BlockEvents(3, [2.0, 4.0], [1.0, 1.5], [0.25])}))
    samples = scrape(metrics)
    assert sample_value(samples, "kvmux_kv_cache_copied_blocks_total", strategy="paged") == 3
    for name, count, total in (("lifetime", 2, 6.0), ("idle_before_evict", 2, 2.5), ("reuse_gap", 1, 0.25)):
        assert sample_value(samples, f"kvmux_kv_block_{name}_seconds_count", strategy="paged") == count
        assert sample_value(samples, f"kvmux_kv_block_{name}_seconds_sum", strategy="paged") == total


@pytest.mark.parametrize(
    ("part", "phase"), [(StepPart(2, 0, 2), "decode"), (StepPart(0, 1, 9), "prefill"), (StepPart(2, 1, 9), "mixed")]
)
def test_operations_are_told_by_who_computed_them_and_for_what(part: StepPart, phase: str) -> None:
    backends = {"attend": "cpu-avx2", "rope": "reference"}
    metrics = new_metrics(backends=backends, fallback_ops=["rope"])
    before = scrape(metrics)
    assert {(each["op"], each["backend"]) for each in labels_of(before, "kvmux_kernel_seconds_count")} == {
        *backends.items()
    }
    metrics.observe_step(fake_step(parts={"paged": part}, op_seconds={"attend": 0.01, "rope": 0.0}))
    samples = scrape(metrics)
    attend = {"op": "attend", "backend": "cpu-avx2", "phase": phase}
    assert sample_value(samples, "kvmux_kernel_seconds_sum", **attend) == pytest.approx(0.01)
    assert sample_value(samples, "kvmux_timed_step_seconds_sum", phase=phase) == pytest.approx(0.02)
    assert sum(v for (name, _), v in samples.items() if name == "kvmux_kernel_seconds_count") == 1
    assert sample_value(samples, "kvmux_kernel_fallback", op="rope") == 1
    assert sample_value(samples, "kvmux_kernel_fallback", op="attend") == 0


def test_drafts_count_with_what_came_true_of_them() -> None:
    metrics = new_metrics()
    metrics.observe_step(
        fake_step(drafts={"paged": [DraftRecord(4, 2), DraftRecord(1, 0)], "contiguous": [DraftRecord(3, 3)]})
    )
    metrics.observe_step(fake_step(drafts={"paged": [DraftRecord(2, 1)]}))
    samples = scrape(metrics)
    for instance, drafts, tokens, came_true in (("paged", 3, 7, [2, 1]), ("contiguous", 1, 3, [1, 1, 1])):
        assert sample_value(samples, "kvmux_spec_decode_num_drafts_total", strategy=instance) == drafts
        assert sample_value(samples, "kvmux_spec_decode_num_draft_tokens_total", strategy=instance) == tokens
        assert sample_value(samples, "kvmux_spec_decode_num_accepted_tokens_total", strategy=instance) == sum(came_true)
        name = "kvmux_spec_decode_num_accepted_tokens_per_pos_total"
        counts = [sample_value(samples, name, strategy=instance, position=str(i)) for i in range(MAX_DRAFT_TOKENS)]
        assert counts == came_true + [0] * (MAX_DRAFT_TOKENS - len(came_true))


def test_what_does_not_change_is_told_in_labels() -> None:
    samples = scrape(new_metrics(restarts=2))
    assert labels_of(samples, "kvmux_build_info") == [{"version": "1.2.3", "torch": "2.13.0"}]
    (settings,) = labels_of(samples, "kvmux_settings_info")
    assert settings == {"device": "cpu", "deterministic": "false", "max_seq_len": "512", "queue_timeout": "none"}
    strategies = {each["strategy"]: each for each in labels_of(samples, "kvmux_strategy_info")}
    assert set(strategies) == set(INSTANCES)
    assert strategies["paged"]["kind"] == "paged"
    assert "block_size=32, prefix_cache=true, eviction=lru" in strategies["paged"]["options"]
    assert sample_value(samples, "kvmux_engine_restarts_total") == 2


def test_responses_are_counted_under_a_closed_set_of_codes() -> None:
    metrics = new_metrics()
    before = set(scrape(metrics))
    metrics.observe_responses({200: 3, 404: 1, 418: 2, 299: 1})
    metrics.observe_responses({200: 1})
    samples = scrape(metrics)
    assert set(samples) == before
    assert sample_value(samples, "kvmux_http_responses_total", code="200") == 4
    assert sample_value(samples, "kvmux_http_responses_total", code="404") == 1
    assert sample_value(samples, "kvmux_http_responses_total", code="other") == 3


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = new_metrics(), new_metrics()
    one.observe_request(fake_record())
    assert sample_value(scrape(other), "kvmux_requests_total", strategy="paged", outcome="stop") == 0


def test_an_engine_and_its_metrics_agree_on_what_was_sent() -> None:
    driver = Driver(Path("tiny"), max_num_seqs=3, kv_memory="12MiB")
    metrics = Metrics(make_engine_info(driver.engine))
    prompts = {"paged": 5, "contiguous": 20, "sliding_window": 33}
    for instance, length in prompts.items():
        for i in range(2):
            driver.submit(f"{instance} {i}", random_prompt(length), 4 + i, kv_cache=instance)
    driver.submit("gone", random_prompt(9), 4, kv_cache="paged")
    driver.cancel("gone")
    driver.run()
    driver.step()
    for result in driver.steps:
        metrics.observe(result.report, result.finished)
    samples = scrape(metrics, read_engine_state(driver.engine, {}))
    for instance, length in prompts.items():
        gone = 9 * (instance == "paged")
        assert sample_value(samples, "kvmux_requests_total", strategy=instance, outcome="length") == 2
        assert sample_value(samples, "kvmux_requests_total", strategy=instance, outcome="cancelled") == bool(gone)
        assert sample_value(samples, "kvmux_prompt_tokens_total", strategy=instance) == 2 * length, (
            "nobody was computed in vain"
        )
        assert sample_value(samples, "kvmux_generation_tokens_total", strategy=instance) == 9
        assert sample_value(samples, "kvmux_inter_token_latency_seconds_count", strategy=instance) == 9 - 2
        assert sample_value(samples, "kvmux_num_requests_running", strategy=instance) == 0
        assert sample_value(samples, "kvmux_kv_cache_bytes", strategy=instance, state="used") == 0
    assert sample_value(samples, "kvmux_step_tokens_sum") == sum(result.report.tokens for result in driver.steps)


def test_constraints_and_grammars_are_counted() -> None:
    metrics = new_metrics()
    metrics.observe_constraints({"json": 2, "tools": 1}, {"invalid": 3, "too_large": 1})
    metrics.observe_constraints({"json": 1}, {})
    for events in (
        GrammarEvents(0.00004, [0.003, 0.7], lookups=3, hits=1, failures=1),
        GrammarEvents(0.0, [0.3], lookups=0, hits=0, failures=0),  # a step of others
        None,
    ):
        metrics.observe_step(fake_step(grammars=events))
    samples = scrape(metrics)
    found = {
        (name.removeprefix("kvmux_"), *dict(labels).values()): value
        for (name, labels), value in samples.items()
        if value and ("constrain" in name or "grammar" in name) and not name.endswith("_bucket")
    }
    assert found == {
        ("constrained_requests_total", "json"): 3,
        ("constrained_requests_total", "tools"): 1,
        ("constraint_refusals_total", "invalid"): 3,
        ("constraint_refusals_total", "too_large"): 1,
        ("constraint_refusals_total", "failed"): 1,
        ("grammar_compile_seconds_count",): 3,
        ("grammar_compile_seconds_sum",): pytest.approx(1.003),
        ("grammar_step_seconds_count",): 1,
        ("grammar_step_seconds_sum",): pytest.approx(0.00004),
        ("grammar_cache_queries_total",): 3,
        ("grammar_cache_hits_total",): 1,
    }
    assert sample_value(samples, "kvmux_grammar_step_seconds_bucket", le="2e-05") == 0
    assert sample_value(samples, "kvmux_grammar_step_seconds_bucket", le="5e-05") == 1
