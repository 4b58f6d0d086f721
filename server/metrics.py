"""What Prometheus reads, by strategy. Knows step reports, request records and usage; nothing of how they came about.

Names follow vLLM's (with our prefix), so that dashboards compare; every counter starts at 0 for every instance, and no
label takes a value that a client chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cache_strategies.base import Miss, Usage
from kernels.table import OPS
from server.engine.report import RequestRecord, StepReport

MISSES = get_args(Miss)
OUTCOMES = ("stop", "length", "cancelled", "error")
KV_STATES = ("used", "idle", "wasted")

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
REQUEST = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """The one registry of the server."""

    def __init__(self, instances: Sequence[str], faulty_kernels: Sequence[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._instances = instances
        self._declare_requests()
        self._declare_engine()
        for op in OPS:
            self._kernel_faults.labels(op.name).set(op.name in faulty_kernels)
        for name in instances:
            self._start_at_zero(name)
        self.observe_step(
            StepReport(seconds=0.0, parts={}, preempted={}, failures={}, forked={}, evicted={}, running={}, waiting={})
        )

    def observe_request(self, record: RequestRecord) -> None:
        """A request has left the engine."""
        name = record.instance
        self._requests.labels(name, record.outcome).inc()
        self._prompt_tokens.labels(name).inc(record.prompt_tokens)
        if record.cached_tokens is not None and not record.forked:
            self._cache_queries.labels(name).inc(record.prompt_tokens)
            self._cache_hits.labels(name).inc(record.cached_tokens)
            missed = record.prompt_tokens - record.cached_tokens
            self._cache_misses.labels(name, record.miss or "short").inc(missed)  # the last token always is
        self._end_to_end.labels(name).observe(record.total_seconds)
        for histogram, seconds in (
            (self._queue, record.queue_seconds),
            (self._prefill, record.prefill_seconds),
            (self._decode, record.decode_seconds),
            (self._first_token, record.first_token_seconds),
        ):
            if seconds is not None:
                histogram.labels(name).observe(seconds)
        if record.decode_seconds is not None and record.generated_tokens > 1:
            self._per_token.labels(name).observe(record.decode_seconds / (record.generated_tokens - 1))

    def observe_step(self, report: StepReport) -> None:
        """The engine has made a step."""
        if report.rows:
            self._steps.inc()
            self._step_seconds.observe(report.seconds)
            self._batch_rows.observe(report.rows)
            self._batch_tokens.observe(report.tokens)
        for name, part in report.parts.items():
            self._generated.labels(name).inc(part.generated)
        for name in self._instances:
            self._generated.labels(name).inc(report.forked.get(name, 0))
            self._forked.labels(name).inc(report.forked.get(name, 0))
            self._running.labels(name).set(report.running.get(name, 0))
            self._waiting.labels(name).set(report.waiting.get(name, 0))
            self._preemptions.labels(name).inc(report.preempted.get(name, 0))
            self._failures.labels(name).inc(report.failures.get(name, 0))
            self._evicted.labels(name).inc(report.evicted.get(name, 0))

    def exposition(self, usage: Mapping[str, Usage]) -> bytes:
        """The text format, with memory as it is now."""
        for name, u in usage.items():
            for state in KV_STATES:
                self._kv_bytes.labels(name, state).set(getattr(u, state))
            self._kv_limit.labels(name).set(u.limit)
            self._kv_usage.labels(name).set(u.used / u.limit if u.limit else 0)
        return generate_latest(self._registry)

    def _declare_requests(self) -> None:
        by, registry = ["strategy"], self._registry
        self._requests = Counter(
            "kvmux_requests", "Requests that left the engine.", ["strategy", "outcome"], registry=registry
        )
        self._prompt_tokens = Counter("kvmux_prompt_tokens", "Prompt tokens of requests.", by, registry=registry)
        self._generated = Counter("kvmux_generation_tokens", "Tokens generated.", by, registry=registry)
        self._cache_queries = Counter(
            "kvmux_prefix_cache_queries", "Prompt tokens looked up in the cache, once a request.", by, registry=registry
        )
        self._cache_hits = Counter("kvmux_prefix_cache_hits", "Of these, tokens found.", by, registry=registry)
        self._cache_misses = Counter(
            "kvmux_prefix_cache_misses", "Tokens not found, by reason.", ["strategy", "reason"], registry=registry
        )
        self._end_to_end = self._seconds("kvmux_e2e_request_latency", "From arrival to the end.", REQUEST)
        self._queue = self._seconds("kvmux_request_queue_time", "From arrival to a seat.", REQUEST)
        self._prefill = self._seconds("kvmux_request_prefill_time", "From a seat to the first token.", REQUEST)
        self._decode = self._seconds("kvmux_request_decode_time", "From the first token to the last.", REQUEST)
        self._first_token = self._seconds("kvmux_time_to_first_token", "From arrival to the first token.", FIRST_TOKEN)
        self._per_token = self._seconds(
            "kvmux_request_time_per_output_token", "Mean time between two tokens of a request.", PER_TOKEN
        )

    def _declare_engine(self) -> None:
        by, registry = ["strategy"], self._registry
        self._running = Gauge("kvmux_num_requests_running", "Requests with a seat.", by, registry=registry)
        self._waiting = Gauge("kvmux_num_requests_waiting", "Requests without a seat.", by, registry=registry)
        self._preemptions = Counter("kvmux_num_preemptions", "Seats taken to make room.", by, registry=registry)
        self._failures = Counter("kvmux_strategy_failures", "Exceptions in a strategy.", by, registry=registry)
        self._forked = Counter("kvmux_forks", "Choices that took over another's prompt.", by, registry=registry)
        self._evicted = Counter(
            "kvmux_kv_cache_evicted_bytes", "Idle KV memory that had to make room.", by, registry=registry
        )
        self._steps = Counter("kvmux_steps", "Forward passes.", registry=registry)
        self._step_seconds = Histogram("kvmux_step_seconds", "Of a step.", buckets=PER_TOKEN, registry=registry)
        self._batch_rows = Histogram("kvmux_step_rows", "Sequences in a step.", buckets=POWERS, registry=registry)
        self._batch_tokens = Histogram("kvmux_step_tokens", "Tokens in a step.", buckets=POWERS, registry=registry)
        self._kv_bytes = Gauge(
            "kvmux_kv_cache_bytes", "KV memory held, by what is in it.", ["strategy", "state"], registry=registry
        )
        self._kv_limit = Gauge("kvmux_kv_cache_limit_bytes", "KV memory it may hold.", by, registry=registry)
        self._kv_usage = Gauge("kvmux_kv_cache_usage_ratio", "Used bytes of the limit, 0 to 1.", by, registry=registry)

        self._kernel_faults = Gauge(
            "kvmux_kernel_fallback", "1: it failed its check, and plain torch computes it.", ["op"], registry=registry
        )

    def _seconds(self, name: str, what: str, edges: tuple[float, ...]) -> Histogram:
        return Histogram(f"{name}_seconds", what, ["strategy"], buckets=edges, registry=self._registry)

    def _start_at_zero(self, name: str) -> None:
        for outcome in OUTCOMES:
            self._requests.labels(name, outcome)
        for reason in MISSES:
            self._cache_misses.labels(name, reason)
        for metric in (self._prompt_tokens, self._generated, self._cache_queries, self._cache_hits):
            metric.labels(name)
        for histogram in (
            self._end_to_end,
            self._queue,
            self._prefill,
            self._decode,
            self._first_token,
            self._per_token,
        ):
            histogram.labels(name)
