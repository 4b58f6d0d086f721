"""Metrics of made-up engines, steps and requests, and readers of what they expose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cache_strategies.registry import resolve_instances
from cache_strategies.types import Blocks, CacheUsage
from config.settings import Settings
from kernels.selfcheck.op_db import OPS
from server.metrics.exposition import Renderer
from server.metrics.registry import Metrics
from server.records import DeviceMemory, EngineInfo, EngineState, KVTokens, RequestFidelity, RequestRecord, StepReport

INSTANCES = ("paged", "contiguous")
PAIR = {"served": "paged", "candidate": "contiguous"}
EMPTY = CacheUsage(0, 0, 0, 0, 0, 0, 0)
ABOUT = EngineInfo(
    instances=[each for each in resolve_instances(Settings().strategies) if each.name in INSTANCES],
    backends={op.name: "cpu-avx2" for op in OPS},
    fallback_ops=[],
    versions={"version": "1.2.3", "torch": "2.13.0"},
    settings={"device": "cpu", "deterministic": False, "max_seq_len": 512, "queue_timeout": None, "rules": []},
    restarts=0,
    disabled=[],
)
IDLE = EngineState(
    running={},
    waiting={},
    usage=dict.fromkeys(INSTANCES, EMPTY),
    tokens=dict.fromkeys(INSTANCES, KVTokens(0, 0)),
    budget_tokens=dict.fromkeys(INSTANCES, 0),
    blocks=dict.fromkeys(INSTANCES, Blocks()),
    checkpoint_bytes=dict.fromkeys(INSTANCES, 0),
    floor_bytes=dict.fromkeys(INSTANCES, 0),
    quarantined=(),
    pool_warm=0,
    pool_held=0,
    pool_cold=0,
    device_memory=DeviceMemory(0, 0),
    process_memory={},
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def new_metrics(**about: Any) -> Metrics:
    return Metrics(replace(ABOUT, **about))


def scrape(metrics: Metrics, state: EngineState = IDLE) -> Samples:
    return parse_samples(exposition(metrics, state).decode())


def exposition(metrics: Metrics, state: EngineState = IDLE, *, openmetrics: bool = False) -> bytes:
    """Return the text of /metrics, as an API process writes it."""
    return Renderer().render(metrics.snapshot(state), openmetrics=openmetrics)


def parse_samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample_value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def labels_of(samples: Samples, name: str) -> Sequence[dict[str, str]]:
    """Return the labels of all samples of that name."""
    return [dict(labels) for sample, labels in samples if sample == name]


def fake_state(**changes: Any) -> EngineState:
    return replace(IDLE, **changes)


def fake_shadow(kl: list[float], agreed: list[bool], **changes: object) -> RequestFidelity:
    values: dict[str, object] = {**PAIR, "rollout": "int8", "kl": kl, "agreed": agreed, "rank": [1] * len(kl)}
    values |= {"served_bytes": 100, "candidate_bytes": 50}
    return RequestFidelity(**(values | changes))  # type: ignore[arg-type]


def fake_record(instance: str = "paged", outcome: str = "stop", **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "instance": instance,
        "reason": "default",
        "outcome": outcome,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "miss": "cold",
        "forked": False,
        "generated_tokens": 5,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "kv_bytes": 1000,
        "kept_tokens": 34,
        "dropped_tokens": 0,
        "budget_tokens": None,
        "compactions": 0,
        "compaction_seconds": 0.0,
        "queue_seconds": 0.001,
        "prefill_seconds": 0.1,
        "decode_seconds": 0.4,
        "first_token_seconds": 0.101,
        "total_seconds": 0.6,
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def fake_step(**changes: object) -> StepReport:
    values: dict[str, object] = {
        "seconds": 0.02,
        "parts": {},
        "preemptions": {},
        "failures": {},
        "generated_tokens": {},
        "drafts": {},
        "forks": {},
        "admissions": [],
        "evicted_bytes": {},
        "compactions": {},
        "inter_token_seconds": {},
        "block_events": {},
        "op_seconds": None,
    }
    return StepReport(**(values | changes))  # type: ignore[arg-type]
