"""Counts what happens, by strategy. Knows step reports, request records and usage; nothing of how they came about.

Every series is there from the start, at zero. What a request found in the cache counts once, when it is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

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
        self._made = {family: family.make(self._registry) for family in FAMILIES}
        known = {STRATEGY: instances, OP: [op.name for op in OPS]}
        for family, made in self._made.items():
            values = [known[label] if label.values is None else label.values for label in family.labels]
            for each in product(*values) if values else ():
                made.labels(*each)
        for name in faulty_kernels:
            self._of(f.KERNEL_FALLBACK).labels(name).set(1)

    def _of(self, family: Family[M]) -> M:
        return cast(M, self._made[family])

    def observe_step(self, report: StepReport) -> None:
        """The engine has made a step."""
        if report.rows:
            self._of(f.STEPS).inc()
            self._of(f.STEP_SECONDS).observe(report.seconds)
            self._of(f.STEP_ROWS).observe(report.rows)
            self._of(f.STEP_TOKENS).observe(report.tokens)
        for name, part in report.parts.items():
            self._of(f.GENERATION_TOKENS).labels(name).inc(part.generated)
        for name in self._instances:
            self._of(f.RUNNING).labels(name).set(report.running.get(name, 0))
            for wait in f.WAIT.values or ():
                self._of(f.WAITING).labels(name, wait).set(report.waiting.get((name, wait), 0))
        for family, counts in (
            (f.GENERATION_TOKENS, report.forked),
            (f.FORKS, report.forked),
            (f.PREEMPTIONS, report.preempted),
            (f.FAILURES, report.failures),
            (f.KV_EVICTED, report.evicted),
        ):
            for name, count in counts.items():
                self._of(family).labels(name).inc(count)
        for name, gaps in report.gaps.items():
            latency = self._of(f.INTER_TOKEN_LATENCY).labels(name)
            for seconds in gaps:
                latency.observe(seconds)
        for admission in report.admitted:
            self._observe_admission(admission)

    def _observe_admission(self, admitted: Admission) -> None:
        name = admitted.instance
        self._of(f.PROMPT_TOKENS).labels(name).inc(admitted.prompt_tokens)
        self._of(f.CACHED_TOKENS).labels(name).inc(admitted.cached_tokens)
        if not admitted.forked:
            self._of(f.PREFIX_QUERIES).labels(name).inc(admitted.prompt_tokens)
            self._of(f.PREFIX_HITS).labels(name).inc(admitted.cached_tokens)
            missed = admitted.prompt_tokens - admitted.cached_tokens
            self._of(f.PREFIX_MISSES).labels(name, admitted.miss or "short").inc(missed)  # the last token always is

    def observe_request(self, record: RequestRecord) -> None:
        """A request has left the engine."""
        name = record.instance
        self._of(f.REQUESTS).labels(name, record.outcome).inc()
        for family, seconds in (
            (f.E2E_LATENCY, record.total_seconds),
            (f.QUEUE_TIME, record.queue_seconds),
            (f.PREFILL_TIME, record.prefill_seconds),
            (f.DECODE_TIME, record.decode_seconds),
            (f.FIRST_TOKEN_TIME, record.first_token_seconds),
        ):
            if seconds is not None:
                self._of(family).labels(name).observe(seconds)
        if record.decode_seconds is not None and record.generated_tokens > 1:
            self._of(f.TIME_PER_TOKEN).labels(name).observe(record.decode_seconds / (record.generated_tokens - 1))

    def exposition(self, usage: Mapping[str, Usage], *, openmetrics: bool = False) -> bytes:
        """Prometheus' text format, or OpenMetrics 1.0, with memory as it is now."""
        for name, u in usage.items():
            for state, held in (("used", u.used), ("idle", u.idle), ("wasted", u.wasted)):
                self._of(f.KV_BYTES).labels(name, state).set(held)
            self._of(f.KV_LIMIT).labels(name).set(u.limit)
            self._of(f.KV_USAGE).labels(name).set(u.used / u.limit if u.limit else 0)
        return (generate_openmetrics if openmetrics else generate_latest)(self._registry)
