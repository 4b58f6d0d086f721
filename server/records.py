"""Records of an engine, its steps and its requests: the engine writes them, metrics, logs and the API read them.

Data only. Engine and metrics do not import each other; both import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:  # API processes read records, and import no strategies
    from cache_strategies.base import BlockEvents, Blocks, CacheUsage
    from cache_strategies.registry import Instance

WaitReason = Literal["seats", "memory", "sibling", "turn"]  # what a request waits for; see Scheduler.waits
Outcome = Literal["stop", "length", "cancelled", "error"]  # of a request
Phase = Literal["prefill", "decode", "mixed"]  # of a step; mixed: some of its rows prefill, others decode
Role = Literal["engine", "api", "supervisor"]  # of a process


@dataclass(frozen=True)
class StepPart:
    """One strategy's rows of a step."""

    decode_rows: int = 0
    prefill_rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Admission:
    """The admission of a request: its first row has run. Reported once, even if the request is preempted later."""

    instance: str
    prompt_tokens: int
    cached_tokens: int  # of these, tokens that had been computed before
    miss: str | None  # as in its RequestRecord
    forked: bool


class DraftRecord(NamedTuple):
    """A draft of a request's next tokens that was verified in a step."""

    num_tokens: int
    num_accepted: int  # how many of them, from the first, were accepted


@dataclass(frozen=True)
class StepReport:
    """One step of the engine."""

    seconds: float
    parts: Mapping[str, StepPart]  # by instance
    preemptions: Mapping[str, int]  # requests, by instance
    failures: Mapping[str, int]  # exceptions in a strategy's code, by instance
    generated_tokens: Mapping[str, int]  # tokens drawn, by instance
    drafts: Mapping[str, Sequence[DraftRecord]]  # by instance
    forks: Mapping[str, int]  # requests that took over a sibling's prompt, by instance
    admissions: Sequence[Admission]
    evicted_bytes: Mapping[str, int]  # bytes evicted since the step before, by instance
    inter_token_seconds: Mapping[
        str, Sequence[float]
    ]  # seconds between a token drawn in this step and the one before, by instance
    block_events: Mapping[str, BlockEvents]  # to blocks, by instance
    op_seconds: Mapping[str, float] | None  # seconds of each operation; None: they were not timed in this step

    @property
    def rows(self) -> int:
        return sum(part.decode_rows + part.prefill_rows for part in self.parts.values())

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    @property
    def phase(self) -> Phase:
        """Of a step with rows."""
        if not any(part.prefill_rows for part in self.parts.values()):
            return "decode"
        return "mixed" if any(part.decode_rows for part in self.parts.values()) else "prefill"


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that has left the engine. Times are seconds; None where the request did not get that far."""

    instance: str
    reason: str  # why this instance
    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int | None  # None: it was never admitted, so none were looked up
    miss: str | None  # why no more was found (`cache_strategies.base.Miss`); None: all was found, or nothing looked up
    forked: bool  # it took over a sibling's prompt, so it was not looked up in the cache
    generated_tokens: int
    drafted_tokens: int  # draft tokens that were verified
    accepted_tokens: int  # draft tokens that were accepted
    preemptions: int
    kv_bytes: int  # KV memory of its text, shared blocks counted in full
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


class DeviceMemory(NamedTuple):
    """The memory of a device in bytes; for a CPU the machine's, or its container's."""

    used: int
    free: int


@dataclass(frozen=True)
class EngineInfo:
    """The properties of an engine that do not change while it runs."""

    instances: Sequence[Instance]
    backends: Mapping[str, str]  # by operation
    fallback_ops: Sequence[str]  # operations that failed their check
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    restarts: int  # number of engines that ran before this one


@dataclass(frozen=True)
class EngineState:
    """Gauges of an engine: bytes and counts, by instance unless noted."""

    running: Mapping[str, int]  # requests
    waiting: Mapping[tuple[str, WaitReason], int]  # requests, by instance and reason
    usage: Mapping[str, CacheUsage]
    blocks: Mapping[str, Blocks]
    floor_bytes: Mapping[str, int]
    pool_free: int  # KV memory that no instance holds
    pool_held: int  # KV memory that an instance holds
    pool_untouched: int  # KV memory that the system has not provided yet
    device_memory: DeviceMemory
    process_memory: Mapping[Role, int]  # resident memory, by role
