"""Counts what happens, by strategy. Knows step reports, request records and usage; nothing of how they came about.

Every series is there from the start, at zero. What a request found in the cache counts once, when it is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from cache_strategies.base import Usage
from kernels.table import OPS
from server.engine.report import Admission, RequestRecord, StepReport
from server.metrics import families as f
from server.metrics.families import FAMILIES, OP, STRATEGY, Family, M


class Metrics:
    """The one registry of the server."""

    def __init__(self, instances: Sequence[str], faulty_kernels: Sequence[str] = ()) -> None:
        self._instances = instances
        self._registry = CollectorRegistry()
        self._series: dict[tuple[Family[Any], tuple[str, ...]], Any] = {}  # by family and values of its labels
        known = {STRATEGY: instances, OP: [op.name for op in OPS]}
        for family in FAMILIES:
            made = family.make(self._registry)
            values = [known[label] if label.values is None else label.values for label in family.labels]
            self._series |= {(family, each): made.labels(*each) if each else made for each in product(*values)}
        for name in faulty_kernels:
            self._at(f.KERNEL_FALLBACK, name).set(1)

    def _at(self, family: Family[M], *values: str) -> M:
        """One series, by the values of its labels."""
        return cast(M, self._series[family, values])

    def observe_step(self, report: StepReport) -> None:
        """The engine has made a step."""
        if report.rows:
            self._at(f.STEPS).inc()
            self._at(f.STEP_SECONDS).observe(report.seconds)
            self._at(f.STEP_ROWS).observe(report.rows)
            self._at(f.STEP_TOKENS).observe(report.tokens)
        for name, part in report.parts.items():
            self._at(f.GENERATION_TOKENS, name).inc(part.generated)
        for name in self._instances:
            self._at(f.RUNNING, name).set(report.running.get(name, 0))
            for wait in f.WAIT.values or ():
                self._at(f.WAITING, name, wait).set(report.waiting.get((name, wait), 0))
        for family, counts in (
            (f.GENERATION_TOKENS, report.forked),
            (f.FORKS, report.forked),
            (f.PREEMPTIONS, report.preempted),
            (f.FAILURES, report.failures),
            (f.KV_EVICTED, report.evicted),
        ):
            for name, count in counts.items():
                self._at(family, name).inc(count)
        for name, gaps in report.gaps.items():
            latency = self._at(f.INTER_TOKEN_LATENCY, name)
            for seconds in gaps:
                latency.observe(seconds)
        for admission in report.admitted:
            self._observe_admission(admission)

    def _observe_admission(self, admitted: Admission) -> None:
        name = admitted.instance
        self._at(f.PROMPT_TOKENS, name).inc(admitted.prompt_tokens)
        self._at(f.CACHED_TOKENS, name).inc(admitted.cached_tokens)
        if not admitted.forked:
            self._at(f.PREFIX_QUERIES, name).inc(admitted.prompt_tokens)
            self._at(f.PREFIX_HITS, name).inc(admitted.cached_tokens)
            missed = admitted.prompt_tokens - admitted.cached_tokens
            self._at(f.PREFIX_MISSES, name, admitted.miss or "short").inc(missed)  # the last token always is

    def observe_request(self, record: RequestRecord) -> None:
        """A request has left the engine."""
        name = record.instance
        self._at(f.REQUESTS, name, record.outcome).inc()
        for family, seconds in (
            (f.E2E_LATENCY, record.total_seconds),
            (f.QUEUE_TIME, record.queue_seconds),
            (f.PREFILL_TIME, record.prefill_seconds),
            (f.DECODE_TIME, record.decode_seconds),
            (f.FIRST_TOKEN_TIME, record.first_token_seconds),
        ):
            if seconds is not None:
                self._at(family, name).observe(seconds)
        if record.decode_seconds is not None and record.generated_tokens > 1:
            self._at(f.TIME_PER_TOKEN, name).observe(record.decode_seconds / (record.generated_tokens - 1))

    def exposition(self, usage: Mapping[str, Usage], *, openmetrics: bool = False) -> bytes:
        """Prometheus' text format, or OpenMetrics 1.0, with memory as it is now."""
        for name, u in usage.items():
            for state, held in (("used", u.used), ("idle", u.idle), ("wasted", u.wasted)):
                self._at(f.KV_BYTES, name, state).set(held)
            self._at(f.KV_LIMIT, name).set(u.limit)
            self._at(f.KV_USAGE, name).set(u.used / u.limit if u.limit else 0)
        return (generate_openmetrics if openmetrics else generate_latest)(self._registry)
