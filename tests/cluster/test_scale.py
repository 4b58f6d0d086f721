"""A machine is divided among its replicas, and replicas are added and removed by load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import SettingsError
from config.settings import Settings
from server.cluster.autoscaling import TARGET_KV_USAGE, TARGET_TOKENS, autoscaling_policy, choose_num_replicas
from server.cluster.scale import Scale, divide_machine
from server.processes.cgroups import count_processors

CORES = count_processors()  # within the quota of the container that the tests run in


@pytest.mark.parametrize(
    ("fields", "nodes", "expected"),
    [
        ({"replicas": 4}, 1, 4),
        ({"replicas": 4}, 4, 1),
        ({"replicas": 5}, 4, 2),
        ({"replicas": 2, "max_replicas": 8}, 4, 2),
        ({"replicas": 8, "replicas_per_node": 3}, 1, 3),
        ({"replicas": 4}, 0, 4),
    ],
)
def test_replicas_are_divided_among_machines(fields: dict[str, int], nodes: int, expected: int) -> None:
    assert Scale(**fields).count_per_node(nodes) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"replicas": 0}, {"replicas": 3, "max_replicas": 2}, {"replicas": 1, "replicas_per_node": 0}]
)
def test_impossible_numbers_of_replicas_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        Scale(**fields)  # type: ignore[arg-type]


def test_automatic_memory_and_threads_are_divided() -> None:
    divided = divide_machine(Settings(kv_memory_share=0.4), 4)
    assert divided.kv_memory_share == pytest.approx(0.1)
    assert divided.threads == max(1, CORES // 4)
    alone = divide_machine(Settings(), 1)
    assert (alone.kv_memory_share, alone.threads) == (Settings().kv_memory_share, None)


def test_sizes_and_numbers_in_the_settings_are_for_each_replica() -> None:
    given = Settings(kv_memory="1GiB", threads=3)
    divided = divide_machine(given, 4)
    assert (divided.kv_memory, divided.kv_memory_share, divided.threads) == ("1GiB", given.kv_memory_share, 3)


@pytest.mark.parametrize(("gpus", "shares"), [(1.0, 1), (0.5, 2), (0.25, 4), (2.0, 1)])
def test_the_memory_of_a_gpu_is_divided_among_those_that_share_it(gpus: float, shares: int) -> None:
    divided = divide_machine(Settings(kv_memory_share=0.8), 8, gpus)
    assert divided.kv_memory_share == pytest.approx(0.8 / shares)


# ---------------------------------------------------------------- autoscaling
def test_replicas_are_added_for_queues_and_for_full_memory() -> None:
    assert choose_num_replicas(2, [0, 0], [0.1, 0.2]) == 1
    assert choose_num_replicas(2, [3 * TARGET_TOKENS, 2 * TARGET_TOKENS], [0.1, 0.1]) == 5
    assert choose_num_replicas(2, [0, 0], [1.0, 1.0]) == 3
    assert choose_num_replicas(2, [0, 0], [TARGET_KV_USAGE, TARGET_KV_USAGE]) == 2
    assert choose_num_replicas(1, [], []) == 1, "nothing is known yet"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), min_size=1, max_size=20))
def test_a_constant_load_leads_to_a_constant_number_of_replicas(load: list[tuple[float, float]]) -> None:
    """Otherwise replicas would be added and removed without end."""
    tokens, usage = sum(each for each, _ in load), sum(each for _, each in load)
    count = len(load)
    seen = []
    for _ in range(12):
        count = choose_num_replicas(count, [tokens / count] * count, [usage / count] * count)
        seen.append(count)
    assert len(set(seen[-3:])) == 1, seen


def test_the_policy_reads_an_autoscaling_context_of_ray() -> None:
    context = SimpleNamespace(
        current_num_replicas=2,
        aggregated_metrics={"queued_tokens": {"a": 3 * TARGET_TOKENS, "b": 0.0}, "kv_usage": {"a": 0.1, "b": 0.1}},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )
    number: Any = autoscaling_policy(context)
    assert number == (3, {})
    context.capacity_adjusted_max_replicas = 2
    assert autoscaling_policy(context) == (2, {})
    context.aggregated_metrics = {}
    context.capacity_adjusted_min_replicas = 2
    assert autoscaling_policy(context) == (2, {})
