"""Makes the records of steps and requests (`records.py`). Knows neither where they are sent nor what runs next."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from server.engine.instance_reports import read_budget
from server.engine.scheduling.request import Request
from server.engine.scheduling.step import Scheduled
from server.records import (
    Admission,
    Compaction,
    DraftRecord,
    KVTokens,
    Outcome,
    RequestRecord,
    StepPart,
    StepReport,
)


@dataclass
class CompactionTotals:
    """The compactions of an instance since the engine's start."""

    count: int = 0
    seconds: float = 0.0
    dropped_tokens: int = 0

    def add(self, compaction: Compaction) -> None:
        self.count += 1
        self.seconds += compaction.seconds
        self.dropped_tokens += compaction.dropped_tokens


@dataclass
class StepAccumulator:
    """What happens to requests in a step, for its report. Mappings are keyed by strategy instance."""

    generated_tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    drafts: defaultdict[str, list[DraftRecord]] = field(default_factory=lambda: defaultdict(list))
    # Number of requests that took over the prompt that another choice (n > 1) of the same request had computed
    forks: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    admissions: list[Admission] = field(default_factory=list)
    inter_token_seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    compactions: defaultdict[str, list[Compaction]] = field(default_factory=lambda: defaultdict(list))
    finished: list[RequestRecord] = field(default_factory=list)
    parts: dict[str, StepPart] = field(default_factory=dict)

    def add_rows(self, parts: Mapping[str, StepPart]) -> None:
        """Add the numbers of rows and tokens that were computed together; a step may have several such groups."""
        if not self.parts:
            self.parts = dict(parts)
            return
        for name, part in parts.items():
            before = self.parts.get(name, StepPart())
            self.parts[name] = StepPart(*(a + b for a, b in zip(astuple(before), astuple(part), strict=True)))

    def make_report(self, **others: Any) -> StepReport:
        """Return the report of the step; `others` are the fields of StepReport that do not concern single requests."""
        own = {name: value for name, value in vars(self).items() if name != "finished"}
        return StepReport(**own, **others)


def make_step_parts(scheduled: Sequence[Scheduled]) -> dict[str, StepPart]:
    """Return the numbers of rows and tokens of a step by instance; rows of extensions do not count."""
    counts: dict[str, list[int]] = {}  # [decode rows, all rows, tokens] by instance
    for request, num_tokens, draft, _, _, num_observed in scheduled:
        if num_observed is not None:
            continue
        count = counts.setdefault(request.instance.name, [0, 0, 0])
        count[0] += num_tokens == 1 and request.num_output_tokens > 0
        count[1] += 1
        count[2] += num_tokens + len(draft)
    return {name: StepPart(decode, rows - decode, tokens) for name, (decode, rows, tokens) in counts.items()}


def make_request_record(
    request: Request, outcome: Outcome, tokens: KVTokens, fields: Mapping[str, Any]
) -> RequestRecord:
    """Return the record of a request that ends now; `tokens` are those that it had in the cache.

    `fields` are those of extensions.
    """
    times, now = request.times, time.monotonic()

    def between(start: float, end: float) -> float | None:
        return end - start if start and end else None

    return RequestRecord(
        instance=request.instance.name,
        reason=request.reason,
        outcome=outcome,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        miss=request.miss,
        recomputed_tokens=request.num_recomputed_tokens,
        forked=request.forked,
        generated_tokens=request.num_output_tokens,
        drafted_tokens=request.num_draft_tokens,
        accepted_tokens=request.num_accepted_tokens,
        preemptions=request.num_preemptions,
        kv_bytes=request.kv_bytes if times.admitted else 0,
        kept_tokens=tokens.kept,
        dropped_tokens=tokens.dropped,
        budget_tokens=None if outcome == "error" else read_budget(request.instance, sum(tokens)),
        compactions=request.num_compactions,
        compaction_seconds=request.compaction_seconds,
        queue_seconds=between(times.arrived, times.admitted),
        prefill_seconds=between(times.admitted, times.first_token),
        decode_seconds=between(times.first_token, times.last_token),
        first_token_seconds=between(times.arrived, times.first_token),
        total_seconds=now - times.arrived,
        rollout=request.rollout,
        conversation=request.conversation,
        fallback_of=request.fallback_of,
        **fields,
    )
