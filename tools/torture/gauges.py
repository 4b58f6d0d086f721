"""Parses /metrics, and finds gauges that are wrong on an idle server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

BUSY_BLOCKS = ("in_use", "shared", "pending", "pinned")


@dataclass(frozen=True)
class Metrics:
    """The samples of one response of /metrics, by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of that name that have these labels."""
        selected = labels.items()
        return sum(value for (each, has), value in self.samples.items() if each == name and selected <= has)


def read_metrics(text: str) -> Metrics:
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Metrics(samples)


def find_wrong_gauges(metrics: Metrics) -> Iterator[str]:
    """Yield a description of every wrong gauge, given that no request runs or waits and nothing is pinned."""
    zero = {
        "requests running": metrics.total("kvmux_num_requests_running"),
        "requests waiting": metrics.total("kvmux_num_requests_waiting"),
        "KV bytes used": metrics.total("kvmux_kv_cache_bytes", state="used"),
        "requests that failed in the engine": metrics.total("kvmux_requests_total", outcome="error"),
        "failures of strategies": metrics.total("kvmux_strategy_failures_total"),
        "restarts of the engine": metrics.total("kvmux_engine_restarts_total"),
        **{f"blocks {state}": metrics.total("kvmux_kv_cache_blocks", state=state) for state in BUSY_BLOCKS},
    }
    yield from (f"{name}: {value:g} instead of 0" for name, value in zero.items() if value)
    held = metrics.total("kvmux_kv_cache_pool_bytes", state="held")
    idle = metrics.total("kvmux_kv_cache_bytes", state="idle") + metrics.total("kvmux_kv_cache_bytes", state="wasted")
    if held != idle:
        yield f"KV bytes held: {held:g}, of which {idle:g} are idle or wasted"
