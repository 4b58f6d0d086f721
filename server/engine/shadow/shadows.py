"""All shadows of an engine: starts them, adds their rows to steps, compares logits, and drops them under pressure.

A shadow takes only what served requests leave: a part of the step's token budget, rows below max_num_seqs, memory that
no running request needs. It shares cached tokens with other shadows only (`Salt.shadow`), so that no served request
waits for a prefix that a shadow computes, or counts it as found. Knows the scheduler's limits and caches; nothing of
roll-outs or metrics.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch

from cache_strategies.errors import StrategyError
from server.engine.extension import StepExtension
from server.engine.instance import Instance
from server.engine.ipc.messages import Compared
from server.engine.model_runner import StepOutput
from server.engine.results import Event
from server.engine.sampling.sampler import SamplerInput
from server.engine.scheduling.request import PlannedShadow, Request
from server.engine.scheduling.scheduler import Scheduler, has_room, limit_row, update_length
from server.engine.scheduling.step import RequestFailure, Scheduled
from server.engine.shadow.divergence import measure_divergence
from server.engine.shadow.shadow import ComparedToken, EndedEarly, Shadow
from server.records import Outcome, RequestFidelity, RequestRecord, StepReport

BUDGET_SHARE = 4  # shadows compute at most this part (1/4) of max_num_batched_tokens in a step
MAX_KEPT_BYTES = 64 << 20  # of served logits that wait for the second instance's, over all shadows
# Number of tokens, over all shadows, that are measured in one call: a call takes as long for one as for several
MEASURED_TOGETHER = 32
MEASURED_FOR_CLIENTS = 4  # the same while a client waits for a comparison
MAX_UNMEASURED_BYTES = 16 << 20  # of the logits of either instance that wait for that
# Steps without a row after which a shadow ends: its request waits, or its cache is stuck
MAX_IDLE_STEPS = 200
MAX_WAIT = 10.0  # seconds without a row that a client, whose text is complete, waits for a comparison


class Shadows(StepExtension):
    """The shadows of an engine. A shadow whose strategy raises StrategyError ends; no request is affected."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: dict[Request, PlannedShadow] = {}  # by served request
        self._by_served: dict[Request, Shadow] = {}
        self._by_request: dict[Request, Shadow] = {}  # the same shadows by their own requests
        self._records: list[RequestFidelity] = []
        self._comparisons: list[Event] = []  # for clients
        self._bytes_of_row = 1  # of the logits [V] of one token
        self._num_tokens = Counter[str]()  # of the step's rows, by instance

    def __len__(self) -> int:
        return len(self._by_request)

    def is_busy(self) -> bool:
        return bool(self._by_request)

    def queued(self, request: Request) -> None:
        """Let a new request also run under a second instance once it begins, if that is planned."""
        if request.planned_shadow is not None:
            self.plan(request, request.planned_shadow)

    def plan(self, served: Request, planned: PlannedShadow) -> None:
        """Let a request, which is queued, also run under a second instance once it begins."""
        if planned.instance is not None and planned.instance is not served.instance and served.sampling.max_tokens:
            self._planned[served] = planned
        elif planned.is_reference:
            self._end_comparison(served, None if planned.instance is not None else "failed")

    def report(self, report: StepReport, finished: Sequence[RequestRecord]) -> list[Event]:
        """Add the tokens of shadows' rows and the results of those that have ended; return what clients get of them."""
        report.shadow_tokens, self._num_tokens = self._num_tokens, Counter()
        report.shadows, self._records = self._records, []
        comparisons, self._comparisons = self._comparisons, []
        return comparisons

    # ---------------------------------------------------------------- a step
    def add_rows(self, rows: Sequence[Scheduled]) -> list[Scheduled]:
        """Return the shadows' rows of a step, beside those of served requests."""
        served_rows = rows
        if not self._planned and not self._by_request:
            return []
        for shadow in [each for each in self._by_request.values() if each.served.instance is not each.served_instance]:
            self._end(shadow, None)  # a fallback serves the request now, from its beginning
        latest = time.monotonic() - MAX_WAIT
        for shadow in [each for each in self._by_request.values() if each.is_reference and each.awaited_since < latest]:
            self._end(shadow, "room")
        for request in [row.request for row in served_rows if row.request in self._planned]:
            self._start(request, self._planned.pop(request))
        limits = self._scheduler.limits
        used = sum(row.num_tokens + len(row.draft) for row in served_rows)
        budget = min(limits.max_num_batched_tokens // BUDGET_SHARE, limits.max_num_batched_tokens - used)
        sampling = {row.request for row in served_rows if row.samples}
        added: list[Scheduled] = []
        for shadow in list(self._by_request.values()):
            if len(served_rows) + len(added) >= limits.max_num_seqs or budget <= 0:
                if shadow.has_served_ended:  # whose client may wait for the comparison
                    self._count_idle_step(shadow)
                continue
            num_computable = shadow.count_computable_tokens(served_samples=shadow.served in sampling)
            num_tokens = self._grow(shadow, min(num_computable, budget))
            if num_tokens:
                budget -= num_tokens
                self._num_tokens[shadow.request.instance.name] += num_tokens
                added.append(Scheduled(shadow.request, num_tokens, num_observed=shadow.count_compared(num_tokens)))
        return added

    def committed(self, output: StepOutput) -> StepOutput:
        """Take out the shadows' rows, also of shadows that have ended in this step."""
        rows = {each.request for each in output.scheduled if each.request.is_shadow}
        return output.without(rows) if rows else output

    def forked(self, children: Sequence[Request]) -> None:
        """Start the shadows of requests that have taken over a computed prompt, and draw their first tokens now."""
        for request in children:
            if (planned := self._planned.pop(request, None)) is not None:
                self._start(request, planned)

    def _start(self, served: Request, planned: PlannedShadow) -> None:
        """Open a sequence under the second instance for a request without a token yet, if there is room."""
        instance = planned.instance
        assert instance is not None
        if instance is served.instance:  # a fallback serves the request now
            if planned.is_reference:
                self._end_comparison(served, None)
            return
        sampling = msgspec.structs.replace(served.sampling, logprobs=None, prompt_logprobs=None)
        salt = served.salt._replace(shadow=True)
        request = Request(served.key, served.tokens, sampling, instance, "shadow", salt, is_shadow=True)
        request.num_prompt_tokens = served.num_prompt_tokens
        shadow = Shadow(served, request, served.instance, planned.rollout, planned.is_reference)
        try:
            if not self._fits(request):
                self._report(shadow, "room")
                return
            # What it leaves in the cache is evicted before the tokens of served requests.
            request.sequence = instance.open(served.tokens, salt=salt, ttl=0.0)
        except StrategyError:
            self._report(shadow, "failed")
            return
        if request.sequence is None:
            self._report(shadow, "room")
            return
        request.num_computed_tokens = request.sequence.length
        self._by_served[served] = self._by_request[request] = shadow

    def _fits(self, request: Request) -> bool:
        """Return whether a shadow has room if all running requests take the memory that they need at most."""
        limits, total = self._scheduler.limits, request.max_total_tokens
        if request.num_bounded_tokens > limits.max_seq_len or request.instance.draining:
            return False
        request.peak_bytes = request.instance.bytes_for(total)
        others = sum(r.peak_bytes for r in (*self._scheduler.running, *self._by_request))
        return request.peak_bytes <= request.instance.limit_bytes and others + request.peak_bytes <= limits.kv_bytes

    def _grow(self, shadow: Shadow, max_tokens: int) -> int:
        """Return the number of tokens of a shadow's next row, for which it has memory; 0: none in this step."""
        if not self._count_idle_step(shadow) or max_tokens <= 0:
            return 0
        request, instance = shadow.request, shadow.request.instance
        try:
            with instance.guard["schedule"]:
                if not request.has_committed and not update_length(request):
                    return 0
                assert request.sequence is not None
                num_tokens = limit_row(request.sequence, request.num_computed_tokens, max_tokens)
                is_reserved = has_room(request.sequence, request.num_computed_tokens, num_tokens)
        except StrategyError:
            self._end(shadow, "failed")
            return 0
        if not is_reserved:
            self._end(shadow, "room")
            return 0
        shadow.num_idle_steps, shadow.last_row = 0, time.monotonic()
        return num_tokens

    def _count_idle_step(self, shadow: Shadow) -> bool:
        """Count a step in which a shadow may have no row. Return False if there were too many, which ends it."""
        shadow.num_idle_steps += 1
        if shadow.num_idle_steps <= MAX_IDLE_STEPS:
            return True
        self._end(shadow, "room")
        return False

    def appended(self, sampled: Sequence[SamplerInput], output: StepOutput) -> None:
        """Compare what both instances have predicted. Shadows that are done end."""
        if not self._by_request:
            return
        for request, _, first in sampled:
            num_tokens = len(output.sampled.results[request].tokens)
            if num_tokens and (shadow := self._by_served.get(request)) is not None:
                shadow.add_served_logits(output.logits[first : first + num_tokens])
                self._bytes_of_row = output.logits[0].nbytes
        # Not the rows of `self._by_request`: a shadow has ended if the request that it repeats could not be committed
        for request, rows in output.observed.items():
            if (shadow := self._by_request.get(request)) is not None:
                shadow.match(rows)
        unmeasured = [shadow for shadow in self._by_request.values() if shadow.unmeasured.tokens]
        is_awaited = any(shadow.is_reference for shadow in unmeasured)
        together = MEASURED_FOR_CLIENTS if is_awaited else MEASURED_TOGETHER
        num_unmeasured = sum(len(shadow.unmeasured.tokens) for shadow in unmeasured)
        if num_unmeasured >= min(together, MAX_UNMEASURED_BYTES // self._bytes_of_row):
            self._measure()
        for shadow in list(self._by_request.values()):
            if not shadow.is_finite or (shadow.has_served_ended and not shadow.is_behind):
                self._end(shadow, None)
            else:
                shadow.keep_served_logits(self._count_kept_rows())

    def _measure(self) -> None:
        """Measure the divergence of all tokens that can be compared, of all shadows, with one copy from the device."""
        shadows = [shadow for shadow in self._by_request.values() if shadow.unmeasured.tokens]
        if not shadows:
            return
        served = torch.stack([row for each in shadows for row in each.unmeasured.served])
        second = torch.stack([row for each in shadows for row in each.unmeasured.shadow])
        tokens = [token for each in shadows for token in each.unmeasured.tokens]
        is_reference = [each.is_reference for each in shadows for _ in each.unmeasured.tokens]
        divergences = iter(measure_divergence(served, second, tokens, is_reference))
        for shadow in shadows:
            shadow.take_divergences(divergences)
            if shadow.unsent:
                self._send_comparison(shadow.served, shadow.unsent)
                shadow.unsent = []

    def _count_kept_rows(self) -> int:
        """Return how many rows of served logits each shadow may keep."""
        return max(1, MAX_KEPT_BYTES // self._bytes_of_row // len(self._by_request))

    # ---------------------------------------------------------------- ends
    def ended(self, request: Request, outcome: Outcome) -> Mapping[str, Any]:
        """End the shadow of a served request that ends now, once it has predicted all of the text; tell of it."""
        planned = self._planned.pop(request, None)
        if planned is not None and planned.is_reference:
            self._end_comparison(request, None)
        shadow = self._by_served.pop(request, None)
        if shadow is None:
            return {}
        shadow.served_end = time.monotonic()
        self._measure()
        fields = shadow.summarize()
        if outcome in ("error", "cancelled") or not shadow.is_behind:
            self._end(shadow, None)
        return fields

    def rescue(self, failure: RequestFailure) -> bool:
        """End the shadow that failed in a step, unless it has ended with the request that it repeats."""
        if (shadow := self._by_request.get(failure.request)) is not None:
            self._end(shadow, "failed")
        return failure.request.is_shadow

    def quarantined(self, instances: Collection[str]) -> None:
        """End all shadows under instances that are in quarantine."""
        for served, planned in [*self._planned.items()]:
            assert planned.instance is not None
            if planned.instance.name in instances:
                del self._planned[served]
                if planned.is_reference:
                    self._end_comparison(served, "failed")
        for shadow in [each for each in self._by_request.values() if each.request.instance.name in instances]:
            self._end(shadow, "failed")

    def release_one(self, instance: Instance) -> bool:
        """End the shadow that was started last, for a served request of an instance that needs room.

        If the instance is at its limit, only its own shadows make room. Return False if there is none.
        """
        shadows = [
            each for each in self._by_request.values() if not instance.at_limit or each.request.instance is instance
        ]
        if not shadows:
            return False
        self._end(shadows[-1], "room")
        self._scheduler.mark_room_changed()
        return True

    def _end(self, shadow: Shadow, ended_early: EndedEarly | None) -> None:
        """End a shadow. If its logits were not finite, it has failed, and nothing reuses its keys and values."""
        request = shadow.request
        assert request.sequence is not None
        self._measure()
        if not shadow.is_finite:
            ended_early = "failed"
            request.instance.mark_spoiled(request.sequence)
        self._by_served.pop(shadow.served, None)
        del self._by_request[request]
        self._report(shadow, ended_early)
        request.instance.close(request.sequence)
        request.sequence = None

    # ---------------------------------------------------------------- results
    def _report(self, shadow: Shadow, ended_early: EndedEarly | None) -> None:
        """Record the results of a shadow that has ended, or let the client know that there are no more."""
        if shadow.is_reference:
            self._end_comparison(shadow.served, ended_early)
        else:
            self._records.append(shadow.make_record(ended_early))

    def _send_comparison(self, served: Request, tokens: Sequence[ComparedToken]) -> None:
        worker, request_id = served.key
        indexes = [each.output_index for each in tokens]
        kl, agreed, rank = (list(column) for column in zip(*(each.divergence for each in tokens), strict=True))
        self._comparisons.append(Event(worker, Compared(request_id, indexes, kl, agreed, rank)))

    def _end_comparison(self, served: Request, ended_early: EndedEarly | None) -> None:
        worker, request_id = served.key
        self._comparisons.append(Event(worker, Compared(request_id, is_last=True, ended_early=ended_early)))
