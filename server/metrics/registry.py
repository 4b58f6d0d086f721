"""Counts what happens, by strategy. Reads step reports, request records and the engine's state.

Every series is there from the start, at zero. What a request found in the cache counts once, when it is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast, get_args

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from cache_strategies.base import Happened
from server.engine.about import About
from server.engine.report import Admission, Draft, Phase, RequestRecord, StepReport, Wait
from server.engine.state import State
from server.metrics import families as f
from server.metrics.families import FAMILIES, Family, Label, M

WAITS: tuple[Wait, ...] = get_args(Wait)

disable_created_metrics()  # a time stamp beside every counter, which nobody asked for; holds for the process


class Metrics:
    """The one registry of the server."""

    def __init__(self, about: About) -> None:
        self._instances = [instance.name for instance in about.instances]
        self._registry = CollectorRegistry()
        self._series: dict[tuple[Family[Any], tuple[str, ...]], Any] = {}  # by family and values of its labels
        for family in FAMILIES:
            made = family.make(self._registry)
            for each in _label_values(family, about):
                self._series[family, each] = made.labels(*each) if each else made
        self._backends = about.backends
        self._tell(about)

    def _at(self, family: Family[M], *values: str) -> M:
        """One series, by the values of its labels."""
        return cast(M, self._series[family, values])

    def _tell(self, about: About) -> None:
        """What will not change."""
        self._at(f.BUILD).info(dict(about.versions))
        scalars = {name: value for name, value in about.settings.items() if not isinstance(value, dict | list)}
        self._at(f.SETTINGS).info({name: _in_words(value) for name, value in scalars.items()})
        for instance in about.instances:
            options = ", ".join(f"{k}={_in_words(v)}" for k, v in instance.options.model_dump().items())
            self._at(f.STRATEGIES, instance.name).info({"kind": instance.kind, "options": options})
        for name in about.fallen_back:
            self._at(f.KERNEL_FALLBACK, name).set(1)
        self._at(f.ENGINE_RESTARTS).inc(about.restarts)

    # ---------------------------------------------------------------- as it happens
    def observe(self, report: StepReport, finished: Sequence[RequestRecord]) -> None:
        """What a step of the engine brought."""
        self.observe_step(report)
        for record in finished:
            self.observe_request(record)

    def observe_step(self, report: StepReport) -> None:
        """The engine has made a step."""
        if report.rows:
            self._at(f.STEPS).inc()
            self._at(f.STEP_SECONDS).observe(report.seconds)
            self._at(f.STEP_ROWS).observe(report.rows)
            self._at(f.STEP_TOKENS).observe(report.tokens)
            if report.kernels is not None:
                self._observe_kernels(report.phase, report.seconds, report.kernels)
        for family, counts in (
            (f.GENERATION_TOKENS, report.generated),
            (f.FORKS, report.forked),
            (f.PREEMPTIONS, report.preempted),
            (f.FAILURES, report.failures),
            (f.KV_EVICTED, report.evicted),
        ):
            for name, count in counts.items():
                self._at(family, name).inc(count)
        for name, gaps in report.gaps.items():
            self._observe_all(f.INTER_TOKEN_LATENCY, name, gaps)
        for admission in report.admitted:
            self._observe_admission(admission)
        for name, drafts in report.drafts.items():
            self._observe_drafts(name, drafts)
        for name, happened in report.happened.items():
            self._observe_blocks(name, happened)

    def _observe_admission(self, admitted: Admission) -> None:
        name = admitted.instance
        self._at(f.PROMPT_TOKENS, name).inc(admitted.prompt_tokens)
        self._at(f.CACHED_TOKENS, name).inc(admitted.cached_tokens)
        if not admitted.forked:
            self._at(f.PREFIX_QUERIES, name).inc(admitted.prompt_tokens)
            self._at(f.PREFIX_HITS, name).inc(admitted.cached_tokens)
            missed = admitted.prompt_tokens - admitted.cached_tokens
            self._at(f.PREFIX_MISSES, name, admitted.miss or "short").inc(missed)  # the last token always is

    def _observe_drafts(self, name: str, drafts: Sequence[Draft]) -> None:
        self._at(f.DRAFTS, name).inc(len(drafts))
        for tokens, accepted in drafts:
            self._at(f.DRAFT_TOKENS, name).inc(tokens)
            self._at(f.ACCEPTED_TOKENS, name).inc(accepted)
            for position in range(accepted):
                self._at(f.ACCEPTED_PER_POSITION, name, str(position)).inc()

    def _observe_blocks(self, name: str, happened: Happened) -> None:
        self._at(f.KV_COPIES, name).inc(happened.copies)
        self._observe_all(f.BLOCK_LIFETIME, name, happened.lifetimes)
        self._observe_all(f.BLOCK_IDLE, name, happened.idle_times)
        self._observe_all(f.BLOCK_REUSE_GAP, name, happened.reuse_gaps)

    def _observe_all(self, family: Family[Histogram], name: str, values: Sequence[float]) -> None:
        series = self._at(family, name)
        for value in values:
            series.observe(value)

    def _observe_kernels(self, phase: Phase, step_seconds: float, kernels: Mapping[str, float]) -> None:
        self._at(f.TIMED_STEP_SECONDS, phase).observe(step_seconds)
        for op, seconds in kernels.items():
            if seconds:
                self._at(f.KERNEL_SECONDS, op, self._backends[op], phase).observe(seconds)

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
        if record.cached_tokens is not None:
            self._at(f.REQUEST_PROMPT_TOKENS, name).observe(record.prompt_tokens)
            self._at(f.REQUEST_GENERATION_TOKENS, name).observe(record.generated_tokens)

    def observe_responses(self, responses: Mapping[int, int]) -> None:
        """An API process has answered so many, by status."""
        for status, count in responses.items():
            self._at(f.RESPONSES, str(status) if status in f.STATUSES else f.OTHER).inc(count)

    # ---------------------------------------------------------------- what Prometheus reads
    def exposition(self, state: State, *, openmetrics: bool = False) -> bytes:
        """Prometheus' text format, or OpenMetrics 1.0."""
        for name in self._instances:
            self._show_instance(name, state)
        for family, by_state in (
            (f.KV_POOL, {"held": state.pool_held, "free": state.pool_free}),
            (f.DEVICE_MEMORY, state.device._asdict()),
            (f.PROCESS_MEMORY, state.processes),
        ):
            for value, size in by_state.items():
                self._at(family, value).set(size)
        return (generate_openmetrics if openmetrics else generate_latest)(self._registry)

    def _show_instance(self, name: str, state: State) -> None:
        usage = state.usage[name]
        self._at(f.RUNNING, name).set(state.running.get(name, 0))
        for wait in WAITS:
            self._at(f.WAITING, name, wait).set(state.waiting.get((name, wait), 0))
        for held in f.KV_STATE.values or ():
            self._at(f.KV_BYTES, name, held).set(getattr(usage, held))
        for block, count in state.blocks[name]._asdict().items():
            self._at(f.KV_BLOCKS, name, block).set(count)
        self._at(f.KV_LIMIT, name).set(usage.limit)
        self._at(f.KV_FLOOR, name).set(state.floors[name])
        self._at(f.KV_USAGE, name).set(usage.used / usage.limit if usage.limit else 0)


def _label_values(family: Family[Any], about: About) -> Iterator[tuple[str, ...]]:
    """Of all its series."""
    known: Mapping[Label, Iterable[str]] = {
        f.STRATEGY: [instance.name for instance in about.instances],
        f.OP: about.backends,
        f.BACKEND: set(about.backends.values()),
    }
    for values in product(*(known[label] if label.values is None else label.values for label in family.labels)):
        named = dict(zip(family.labels, values, strict=True))
        if f.BACKEND not in named or about.backends[named[f.OP]] == named[f.BACKEND]:
            yield values


def _in_words(value: object) -> str:
    """As people write it in a settings file."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)
