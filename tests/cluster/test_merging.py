"""Answers of several replicas are merged into one, in which each part names its replica."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from server.cluster.merging import merge_answers
from server.cluster.messages import ReplicaAnswer, Routed
from server.cluster.router_metrics import RouterCounts
from server.engine.ipc.messages import Answer, Clear, Failed, QueryPayload
from server.metrics.exposition import FamilyShape, Renderer, Series, encode_snapshot


def merge(what: QueryPayload, bodies: Mapping[str, Any]) -> Any:
    """Return the merged answer of replicas to `what`; a body that is a Failed is a refusal."""
    answers = [
        ReplicaAnswer(id, Answer(0, b"", body) if isinstance(body, Failed) else Answer(0, json.dumps(body).encode()))
        for id, body in bodies.items()
    ]
    return json.loads(merge_answers(what, answers).body)


# ---------------------------------------------------------------- answers
def test_freed_bytes_are_added_up_and_errors_are_named() -> None:
    bodies = {"a": {"freed_bytes": 100}, "b": Failed("", 409, "not now", "busy"), "c": {"freed_bytes": 100}}
    assert merge(Clear("paged"), bodies) == {
        "freed_bytes": 200,
        "replicas": {
            "a": {"freed_bytes": 100},
            "b": {"error": {"message": "not now", "code": "busy"}},
            "c": {"freed_bytes": 100},
        },
    }


def test_lists_name_the_replica_of_each_item() -> None:
    body = {"object": "list", "data": [{"name": "paged"}], "memory": {"bytes": 10, "warm_bytes": 7}}
    merged = merge("kv_cache", dict.fromkeys("abc", body))
    assert merged["data"] == [{"name": "paged", "replica": id} for id in "abc"]
    assert merged["memory"] == {"bytes": 30, "warm_bytes": 21}


def test_a_rollout_is_listed_once() -> None:
    bodies = {id: {"data": [{"name": "r", "state": id}]} for id in "abc"}
    (rollout,) = merge("rollouts", bodies)["data"]
    assert (rollout["name"], rollout["state"]) == ("r", "a")
    assert {id: each["state"] for id, each in rollout["replicas"].items()} == {"a": "a", "b": "b", "c": "c"}


# ---------------------------------------------------------------- metrics
def make_snapshot(numbers: Sequence[float]) -> bytes:
    """Return metrics of all kinds with these values."""
    families = [
        FamilyShape("gauge", "kvmux_one", "One.", (), (), (Series(()),)),
        FamilyShape("counter", "kvmux_two", "Two.", ("strategy",), (), (Series(("x",)), Series(("y",)))),
        FamilyShape("histogram", "kvmux_three", "Three.", (), (1.0, 2.0), (Series(()),)),
        FamilyShape("info", "kvmux_four", "Four.", (), (), (Series((), {"version": "1"}),)),
    ]
    return encode_snapshot(families, array("d", numbers).tobytes())


def test_metrics_keep_their_values_and_get_the_label_of_their_replica(rng: random.Random) -> None:
    values = {id: [float(rng.randrange(1, 100)) for _ in range(7)] for id in "abc"}
    answers = [ReplicaAnswer(id, Answer(0, make_snapshot(numbers))) for id, numbers in values.items()]
    text = Renderer().render(merge_answers("metrics", answers).body, openmetrics=False).decode()
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for id, (one, x, y, low, middle, high, total) in values.items():
        replica = ("replica", id)
        assert found["kvmux_one", replica] == one
        assert found["kvmux_two_total", replica, ("strategy", "x")] == x
        assert found["kvmux_two_total", replica, ("strategy", "y")] == y
        assert found["kvmux_three_bucket", ("le", "1.0"), replica] == low
        assert found["kvmux_three_bucket", ("le", "2.0"), replica] == low + middle
        assert found["kvmux_three_count", replica] == low + middle + high
        assert found["kvmux_three_sum", replica] == total
        assert found["kvmux_four_info", replica, ("version", "1")] == 1


def test_a_routers_expectations_are_counted_beside_an_engines_metrics() -> None:
    counts = RouterCounts()
    counts.record(Routed("a", "cached", 96), 96)
    counts.record(Routed("a", "cached", 96), 64)
    counts.record(Routed("a", "least loaded", 0), 0)
    text = Renderer().render(counts.append_to(make_snapshot([1.0] * 7)), openmetrics=False).decode()
    assert 'kvmux_router_requests_total{reason="cached"} 2.0' in text
    assert 'kvmux_router_requests_total{reason="least loaded"} 1.0' in text
    assert "kvmux_router_expected_cached_tokens_total 192.0" in text
    assert "kvmux_router_found_cached_tokens_total 160.0" in text
    assert "kvmux_router_right_expectations_total 2.0" in text
    assert "kvmux_one 1.0" in text
