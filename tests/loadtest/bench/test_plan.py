"""Workloads and strategies, as the flags choose them."""

from __future__ import annotations

import pytest

from loadtest.bench.arrivals import Arrivals, Bursts, Closed, Poisson
from loadtest.bench.flags import BenchOptions
from loadtest.bench.plan import plan_workloads
from loadtest.bench.workloads import Drawn


@pytest.mark.parametrize(
    ("wanted", "names", "arrivals", "requests"),
    [
        (BenchOptions(), ["a", "b", "c8", "d"], None, None),
        (BenchOptions(workload=["c16", "a"]), ["c16", "a"], None, None),
        (BenchOptions(requests=5), ["own"], Closed(8), 5),
        (BenchOptions(concurrency=32), ["own"], Closed(32), 32),
        (BenchOptions(workload=["a"], concurrency=3, requests=4), ["a"], Closed(3), 4),
        (BenchOptions(rate=2.0), ["own"], Poisson(2.0), 32),
        (BenchOptions(burst=4), ["own"], Bursts(4, 5.0), 12),
        (BenchOptions(burst=4, every=1.0, requests=5), ["own"], Bursts(4, 1.0), 5),
    ],
)
def test_what_is_planned(
    wanted: BenchOptions, names: list[str], arrivals: Arrivals | None, requests: int | None
) -> None:
    workloads = plan_workloads(wanted)
    assert [each.name for each in workloads] == names
    if arrivals is not None:
        assert [each.arrivals for each in workloads] == [arrivals]
        assert [each.requests for each in workloads] == [requests]


def test_lengths_that_are_planned() -> None:
    (workload,) = plan_workloads(BenchOptions(prompt_tokens=3, shared_tokens=2, max_tokens=1))
    assert isinstance(workload, Drawn)
    assert (workload.prompt_tokens, workload.shared_tokens, workload.max_tokens, workload.phases) == (
        3,
        2,
        1,
        ("cold", "warm"),
    )
