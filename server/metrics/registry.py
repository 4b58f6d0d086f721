"""The registry of metrics: counts step reports and request records by strategy; gauges come from the engine's state.

Every series exists from the start, at zero; those of a roll-out, or of two instances that are compared, from when the
engine first reports it. Tokens that a request found in the cache count once, when it is admitted.
All values are one flat list of numbers: the engine's thread only adds to it and sends copies, which API processes write
as text (`exposition.py`). docs/laboratory/log.md compares the costs of counting in this process and in another.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast, get_args

import msgspec
from prometheus_client import Histogram, Summary

from cache_strategies.types import BlockEvents
from server.metrics import families as f
from server.metrics.exposition import FamilyShape, Kind, Series, Snapshot
from server.metrics.families import FAMILIES
from server.metrics.metric_family import PREFIX, Label, MetricFamily
from server.metrics.vllm_names import make_alias
from server.records import (
    Admission,
    Compaction,
    ConstraintName,
    ConstraintRefusal,
    DraftRecord,
    EngineInfo,
    EngineState,
    GrammarEvents,
    Phase,
    RequestFidelity,
    RequestRecord,
    StepReport,
    WaitReason,
)

WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
# What the live state counts by instance since the engine's start, by its names there
LIVE_COUNTERS: Mapping[str, MetricFamily[Any]] = {
    "prompt_tokens": f.PROMPT_TOKENS,
    "cached_tokens": f.CACHED_TOKENS,
    "generated_tokens": f.GENERATION_TOKENS,
    "preemptions": f.PREEMPTIONS,
    "evicted_bytes": f.KV_EVICTED,
}
LIVE_HISTOGRAMS: Mapping[str, MetricFamily[Histogram]] = {
    "time_to_first_token": f.FIRST_TOKEN_TIME,
    "inter_token_latency": f.INTER_TOKEN_LATENCY,
}


class Metrics:
    """The values of all metrics of one engine; its methods count steps, ended requests and HTTP responses."""

    def __init__(self, about: EngineInfo) -> None:
        self._instances = [instance.name for instance in about.instances]
        self._backends = about.backends
        self._about = about
        self._pairs: dict[tuple[str, str], None] = {}  # instances (served, candidate) that were compared, in order
        self._rollouts: dict[str, None] = {}  # names of roll-outs, in order
        # Index in the list of each series' first number
        self._offsets: dict[tuple[MetricFamily[Any], tuple[str, ...]], int] = {}
        self._numbers = array("d")
        # Of each vLLM series: (indices of the series it sums, numbers per series)
        self._alias_sums: list[tuple[list[int], int]] = []
        self._encoded_families = msgspec.Raw()
        self._lay_out()
        for name in about.fallback_ops:
            self._set(1, f.KERNEL_FALLBACK, name)
        self._increment(about.restarts, f.ENGINE_RESTARTS)
        for name in about.disabled:
            self._set(1, f.DISABLED, name)
            self._increment(1, f.FAILURES, name)  # the call that did not return; it ended the engine that made it

    def _lay_out(self) -> None:
        """Give every series its place in the list of numbers; series that had one before keep their numbers."""
        shapes = [_make_family_shape(family, self._about, self._pairs, self._rollouts) for family in FAMILIES]
        old_offsets, old_numbers = self._offsets, self._numbers
        self._offsets, self._numbers = {}, array("d")
        for family, shape in zip(FAMILIES, shapes, strict=True):
            for series in shape.series:
                key = family, series.labels
                self._offsets[key] = len(self._numbers)
                old = old_offsets.get(key)
                empty = math.nan if family is f.SHADOW_TOP1 else 0.0
                self._numbers.extend(
                    [empty] * shape.num_values if old is None else old_numbers[old : old + shape.num_values]
                )
        self._alias_sums = []
        if self._about.settings.get("vllm_metric_names"):
            shapes += self._add_vllm_aliases(shapes)
        self._encoded_families = msgspec.Raw(msgspec.msgpack.encode(shapes))

    def _add_series(self, pairs: Iterable[tuple[str, str]] = (), rollouts: Iterable[str] = ()) -> None:
        """Add the series of pairs of instances and of roll-outs that have none yet."""
        known = len(self._pairs), len(self._rollouts)
        self._pairs |= dict.fromkeys(pairs)
        self._rollouts |= dict.fromkeys(rollouts)
        if known != (len(self._pairs), len(self._rollouts)):
            self._lay_out()

    def _add_vllm_aliases(self, shapes: Sequence[FamilyShape]) -> list[FamilyShape]:
        """Return the families under vLLM's names; store in `_alias_sums` which of our series each vLLM series sums."""
        found = []
        for family, shape in zip(FAMILIES, shapes, strict=True):
            if (alias := make_alias(family, shape)) is not None:
                found.append(alias.shape)
                for sources in alias.sources:
                    self._alias_sums.append(
                        ([self._offsets[family, each.labels] for each in sources], shape.num_values)
                    )
        return found

    def _increment(self, amount: float, family: MetricFamily[Any], *labels: str) -> None:
        self._numbers[self._offsets[family, labels]] += amount

    def _set(self, value: float, family: MetricFamily[Any], *labels: str) -> None:
        self._numbers[self._offsets[family, labels]] = value

    def _observe(self, values: Iterable[float], family: MetricFamily[Histogram], *labels: str) -> None:
        """Add values to a histogram: count each value in its bucket, and add it to the sum."""
        numbers, edges, place = self._numbers, family.buckets, self._offsets[family, labels]
        for value in values:
            numbers[place + bisect_left(edges, value)] += 1
            numbers[place + len(edges) + 1] += value

    def _observe_summary(self, value: float, family: MetricFamily[Summary], *labels: str) -> None:
        """Add a value to a summary: add one to its count, and the value to its sum."""
        place = self._offsets[family, labels]
        self._numbers[place] += 1
        self._numbers[place + 1] += value

    # ---------------------------------------------------------------- counting
    def observe(self, report: StepReport, finished: Sequence[RequestRecord]) -> None:
        """Count a step of the engine, and the requests that ended with it."""
        self.observe_step(report)
        for record in finished:
            self.observe_request(record)

    def observe_step(self, report: StepReport) -> None:
        """Add the times, tokens, admissions, drafts and block events of one engine step to the metrics."""
        if report.rows:
            self._increment(1, f.STEPS)
            self._observe((report.seconds,), f.STEP_SECONDS)
            self._observe((report.rows,), f.STEP_ROWS)
            self._observe((report.tokens,), f.STEP_TOKENS)
            if report.op_seconds is not None:
                self._observe_kernels(report.phase, report.seconds, report.op_seconds)
        for family, counts in (
            (f.GENERATION_TOKENS, report.generated_tokens),
            (f.FORKS, report.forks),
            (f.PREEMPTIONS, report.preemptions),
            (f.FAILURES, report.failures),
            (f.KV_EVICTED, report.evicted_bytes),
        ):
            for name, count in counts.items():
                self._increment(count, family, name)
        for name, gaps in report.inter_token_seconds.items():
            self._observe(gaps, f.INTER_TOKEN_LATENCY, name)
        for admission in report.admissions:
            self._observe_admission(admission)
        for name, drafts in report.drafts.items():
            self._observe_drafts(name, drafts)
        for name, happened in report.block_events.items():
            self._observe_blocks(name, happened)
        for name, compactions in report.compactions.items():
            self._observe_compactions(name, compactions)
        for name, number in report.shadow_tokens.items():
            self._increment(number, f.SHADOW_COMPUTED, name)
        for compared in report.shadows:
            self._observe_shadow(compared)
        for name in report.rollbacks:
            self._add_series(rollouts=[name])
            self._increment(1, f.ROLLBACKS, name)
        if report.grammars is not None:
            self._observe_grammars(report.grammars)

    def _observe_admission(self, admitted: Admission) -> None:
        name = admitted.instance
        self._increment(admitted.prompt_tokens, f.PROMPT_TOKENS, name)
        self._increment(admitted.cached_tokens, f.CACHED_TOKENS, name)
        if not admitted.forked:
            self._increment(admitted.prompt_tokens, f.PREFIX_QUERIES, name)
            self._increment(admitted.cached_tokens, f.PREFIX_HITS, name)
            self._increment(admitted.recomputed_tokens, f.RECOMPUTED_TOKENS, name)
            missed = admitted.prompt_tokens - admitted.cached_tokens
            self._increment(
                missed, f.PREFIX_MISSES, name, admitted.miss or "short"
            )  # "short" where the admission names no reason: a prompt's last token is never cached

    def _observe_drafts(self, name: str, drafts: Sequence[DraftRecord]) -> None:
        self._increment(len(drafts), f.DRAFTS, name)
        for tokens, accepted in drafts:
            self._increment(tokens, f.DRAFT_TOKENS, name)
            self._increment(accepted, f.ACCEPTED_TOKENS, name)
            for position in range(accepted):
                self._increment(1, f.ACCEPTED_PER_POSITION, name, str(position))

    def _observe_blocks(self, name: str, happened: BlockEvents) -> None:
        self._increment(happened.copies, f.KV_COPIES, name)
        self._observe(happened.lifetimes, f.BLOCK_LIFETIME, name)
        self._observe(happened.idle_times, f.BLOCK_IDLE, name)
        self._observe(happened.reuse_gaps, f.BLOCK_REUSE_GAP, name)

    def _observe_compactions(self, name: str, compactions: Sequence[Compaction]) -> None:
        self._increment(len(compactions), f.KV_COMPACTIONS, name)
        self._increment(sum(each.dropped_tokens for each in compactions), f.KV_COMPACTED, name)
        self._observe((each.seconds for each in compactions), f.KV_COMPACTION_SECONDS, name)

    def _observe_shadow(self, compared: RequestFidelity) -> None:
        """Count a request that also ran under a candidate."""
        pair = compared.served, compared.candidate
        self._add_series(pairs=[pair])
        self._observe(compared.kl, f.SHADOW_KL, *pair)
        self._increment(len(compared.agreed), f.SHADOW_TOKENS, *pair)
        self._increment(sum(compared.agreed), f.SHADOW_AGREED, *pair)
        self._increment(1, f.SHADOW_REQUESTS, *pair, compared.ended_early or "complete")
        if tokens := self._numbers[self._offsets[f.SHADOW_TOKENS, pair]]:
            self._set(self._numbers[self._offsets[f.SHADOW_AGREED, pair]] / tokens, f.SHADOW_TOP1, *pair)

    def _observe_grammars(self, grammars: GrammarEvents) -> None:
        if grammars.step_seconds:
            self._observe((grammars.step_seconds,), f.GRAMMAR_STEP_SECONDS)
        if grammars.compile_seconds or grammars.lookups or grammars.failures:  # in few steps
            self._observe(grammars.compile_seconds, f.GRAMMAR_COMPILE_SECONDS)
            self._increment(grammars.lookups, f.GRAMMAR_LOOKUPS)
            self._increment(grammars.hits, f.GRAMMAR_HITS)
            self._increment(grammars.failures, f.REFUSED_CONSTRAINTS, "failed")

    def _observe_kernels(self, phase: Phase, step_seconds: float, kernels: Mapping[str, float]) -> None:
        self._observe_summary(step_seconds, f.TIMED_STEP_SECONDS, phase)
        for op, seconds in kernels.items():
            if seconds:
                self._observe_summary(seconds, f.KERNEL_SECONDS, op, self._backends[op], phase)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a request that has left the engine, with its times and numbers of tokens."""
        name = record.instance
        self._increment(1, f.REQUESTS, name, record.outcome)
        self._increment(record.dropped_tokens, f.KV_DROPPED, name)
        if record.fallback_of is not None:
            self._increment(1, f.FALLBACK_REQUESTS, record.fallback_of, name)
        for family, seconds in (
            (f.E2E_LATENCY, record.total_seconds),
            (f.QUEUE_TIME, record.queue_seconds),
            (f.PREFILL_TIME, record.prefill_seconds),
            (f.DECODE_TIME, record.decode_seconds),
            (f.FIRST_TOKEN_TIME, record.first_token_seconds),
        ):
            if seconds is not None:
                self._observe((seconds,), family, name)
        if record.decode_seconds is not None and record.generated_tokens > 1:
            self._observe((record.decode_seconds / (record.generated_tokens - 1),), f.TIME_PER_TOKEN, name)
        if record.cached_tokens is not None:
            self._observe((record.prompt_tokens,), f.REQUEST_PROMPT_TOKENS, name)
            self._observe((record.generated_tokens,), f.REQUEST_GENERATION_TOKENS, name)

    def observe_responses(self, responses: Mapping[int, int]) -> None:
        """Count the HTTP responses of an API process; `responses` maps each status to its number of responses."""
        for status, count in responses.items():
            self._increment(count, f.RESPONSES, str(status) if status in f.STATUSES else f.OTHER)

    def observe_constraints(
        self, constraints: Mapping[ConstraintName, int], refusals: Mapping[ConstraintRefusal, int]
    ) -> None:
        """Count the constrained requests of an API process, and those that their constraints ended."""
        for name, count in constraints.items():
            self._increment(count, f.CONSTRAINED_REQUESTS, name)
        for reason, count in refusals.items():
            self._increment(count, f.REFUSED_CONSTRAINTS, reason)

    # ---------------------------------------------------------------- reading
    def snapshot(self, state: EngineState) -> bytes:
        """Return all values as they are now, with gauges from `state`, encoded as a Snapshot."""
        self._add_series(state.shadow_pairs, state.rollouts)
        for name in self._instances:
            self._set_instance_gauges(name, state)
        for name in self._rollouts:
            self._set_rollout_gauges(name, state)
        for family, by_state in (
            (f.KV_POOL, {"held": state.pool_held, "warm": state.pool_warm, "cold": state.pool_cold}),
            (f.DEVICE_MEMORY, state.device_memory._asdict()),
            (f.PROCESS_MEMORY, state.process_memory),
        ):
            for value, size in by_state.items():
                self._set(size, family, value)
        numbers = self._numbers[:]
        for places, width in self._alias_sums:
            numbers.extend(map(sum, zip(*(self._numbers[at : at + width] for at in places), strict=True)))
        return msgspec.msgpack.encode(Snapshot(self._encoded_families, numbers.tobytes()))

    def describe_totals(self) -> dict[str, Any]:
        """Return what was counted by instance, and the upper bounds (in seconds) of histograms, as JSON.

        A histogram has a number for each bound and one for what is above all; numbers are not cumulative.
        """
        totals: dict[str, dict[str, Any]] = {}
        for name in self._instances:
            totals[name] = {key: int(self._read(family, 1, name)[0]) for key, family in LIVE_COUNTERS.items()}
            for key, family in LIVE_HISTOGRAMS.items():
                totals[name][key] = [int(n) for n in self._read(family, len(family.buckets) + 1, name)]
        return {"bounds": {key: family.buckets for key, family in LIVE_HISTOGRAMS.items()}, "instances": totals}

    def _read(self, family: MetricFamily[Any], count: int, *labels: str) -> Sequence[float]:
        """Return the first numbers of a series."""
        place = self._offsets[family, labels]
        return self._numbers[place : place + count]

    def _set_instance_gauges(self, name: str, state: EngineState) -> None:
        usage = state.usage[name]
        self._set(state.running.get(name, 0), f.RUNNING, name)
        for wait in WAIT_REASONS:
            self._set(state.waiting.get((name, wait), 0), f.WAITING, name, wait)
        for held in f.KV_STATE.values or ():
            self._set(getattr(usage, held), f.KV_BYTES, name, held)
        for kept, count in state.tokens[name]._asdict().items():
            self._set(count, f.KV_TOKENS, name, kept)
        for block, count in state.blocks[name]._asdict().items():
            self._set(count, f.KV_BLOCKS, name, block)
        self._set(state.checkpoint_bytes[name], f.CHECKPOINT_BYTES, name)
        self._set(usage.limit, f.KV_LIMIT, name)
        self._set(state.budget_tokens[name], f.KV_BUDGET, name)
        self._set(state.floor_bytes[name], f.KV_FLOOR, name)
        self._set(name in state.quarantined, f.QUARANTINED, name)
        self._set(usage.used / usage.limit if usage.limit else 0, f.KV_USAGE, name)

    def _set_rollout_gauges(self, name: str, state: EngineState) -> None:
        """Set the gauges of a roll-out; one that the engine does not report any more is in no state."""
        current, share = state.rollouts.get(name, ("", 0.0))
        for each in f.ROLLOUT_STATE.values or ():
            self._set(each == current, f.ROLLOUT_CURRENT, name, each)
        self._set(share, f.ROLLOUT_SHARE, name)


def _make_family_shape(
    family: MetricFamily[Any], about: EngineInfo, pairs: Collection[tuple[str, str]], rollouts: Collection[str]
) -> FamilyShape:
    info = _get_info_values(family, about)
    label_values = _iter_label_values(family, about, pairs, rollouts)
    series = tuple(Series(labels, info.get(labels, {})) for labels in label_values)
    kind = cast(Kind, family.kind.__name__.lower())
    names = tuple(label.name for label in family.labels)
    return FamilyShape(kind, PREFIX + family.name, family.help, names, family.buckets, series)


def _get_info_values(family: MetricFamily[Any], about: EngineInfo) -> Mapping[tuple[str, ...], dict[str, str]]:
    """Return the constant values of an info metric, by the values of its labels."""
    if family is f.BUILD:
        return {(): dict(about.versions)}
    if family is f.SETTINGS:
        scalars = {name: value for name, value in about.settings.items() if not isinstance(value, dict | list)}
        return {(): {name: _format_setting(value) for name, value in scalars.items()}}
    if family is f.STRATEGIES:
        return {
            (instance.name,): {
                "kind": instance.kind,
                "options": ", ".join(f"{k}={_format_setting(v)}" for k, v in instance.options.model_dump().items()),
            }
            for instance in about.instances
        }
    return {}


def _iter_label_values(
    family: MetricFamily[Any], about: EngineInfo, pairs: Collection[tuple[str, str]], rollouts: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the label values of every series of a family."""
    names = [*(instance.name for instance in about.instances), *about.disabled]
    known: Mapping[Label, Iterable[str]] = {
        f.STRATEGY: names,
        f.FALLBACK: names,
        f.OP: about.backends,
        f.BACKEND: set(about.backends.values()),
        f.SERVED: dict.fromkeys(served for served, _ in pairs),
        f.CANDIDATE: dict.fromkeys(candidate for _, candidate in pairs),
        f.ROLLOUT: rollouts,
    }
    for values in product(*(known[label] if label.values is None else label.values for label in family.labels)):
        named = dict(zip(family.labels, values, strict=True))
        if f.BACKEND in named and about.backends[named[f.OP]] != named[f.BACKEND]:
            continue
        if f.FALLBACK in named and named[f.FALLBACK] == named[f.STRATEGY]:
            continue
        if f.SERVED not in named or (named[f.SERVED], named[f.CANDIDATE]) in pairs:
            yield values


def _format_setting(value: object) -> str:
    """Return a setting's value as text, with booleans and None in lower case."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)
