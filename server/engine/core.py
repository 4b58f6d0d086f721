"""The core of the engine, without its socket: takes requests, computes steps and returns events.

Combines scheduler, caches and model; `engine/model_runner.py` computes a step and repeats it if it fails. A single
thread calls the core, and all device calls are made in that thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from cache_strategies.arena import Arena
from cache_strategies.base import KVCache
from kernels.ops import Ops
from kernels.tracing import OpTimer, Tracer
from server.engine.grammar.compiler import GrammarCompiler
from server.engine.grammar.waiting import WaitingForGrammars
from server.engine.ipc.messages import Admitted, Explained, Failed, Preempted, Submit, Tokens
from server.engine.isolation.errors import StrategyError
from server.engine.isolation.isolation import Ended, Isolation
from server.engine.kv_memory import KVMemory
from server.engine.model_runner import ModelRunner, RequestsFailed, RowsComputed, StepOutput, run_step
from server.engine.results import Event, StepResult, report_progress
from server.engine.rollouts.rollouts import Rollouts
from server.engine.sampling.sampler import Sampler, SampleResult, SamplerInput, find_grammar_fault
from server.engine.scheduling.fallback import Fallbacks
from server.engine.scheduling.request import Request, make_rejection
from server.engine.scheduling.request_factory import RequestFactory
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.selection import Selector
from server.engine.scheduling.step import FailedRequest, Scheduled
from server.engine.shadow.shadows import Shadows
from server.engine.stats import CompactionTotals, StepAccumulator, count_tokens, make_request_record, merge_step_parts
from server.models.base import Model
from server.records import Admission, Compaction, DraftRecord, Outcome, StepPart

log = logging.getLogger(__name__)

NON_FINITE_LOGITS_MESSAGE = (
    "the model's logits are NaN or infinite under cache strategy {!r}: if they are so under other strategies, too, "
    "check the model's weights; if they are intact, --dtype float32 may help"
)
# Codes of errors that are their strategy's fault: requests that end with one may be moved to a fallback
STRATEGY_CODES = frozenset({"strategy_failed", "strategy_quarantined"})
# One step in TIMING_INTERVAL has its operations timed; a prime number, so as not to coincide with periodic work
TIMING_INTERVAL = 61


class Core:
    """The state of a running engine: the model, the caches, and the requests in the scheduler."""

    def __init__(
        self,
        model: Model,
        isolation: Isolation,
        arena: Arena,
        scheduler: Scheduler,
        selector: Selector,
        rollouts: Rollouts,
        ops: Ops,
        tracer: Tracer,
        grammars: GrammarCompiler,
    ) -> None:
        self.model = model
        self.isolation = isolation
        self.caches: Mapping[str, KVCache] = isolation.caches
        self.arena = arena
        self.scheduler = scheduler
        self.rollouts = rollouts
        self._fallbacks = Fallbacks(isolation, scheduler)
        self._factory = RequestFactory(
            selector, isolation, self._fallbacks, rollouts, arena, scheduler, model.info.eos_ids, grammars
        )
        self.grammars = grammars
        self._waiting = WaitingForGrammars(grammars, scheduler.limits.max_queued_requests)
        self._requests: dict[tuple[int, str], Request] = {}
        self._accumulator = StepAccumulator()
        self._late_events: list[Event] = []  # sent after all others of the step
        self.compactions = {name: CompactionTotals() for name in self.caches}
        self.memory = KVMemory(arena, self.caches, scheduler)
        self.shadows = Shadows(scheduler)
        scheduler.release_spare = self.shadows.release_one
        self.timing_interval = TIMING_INTERVAL  # one step in so many has its operations timed; 0: no step
        self.tracer = tracer
        self._runner = ModelRunner(model, Sampler(model.info.eos_ids, ops.sample), tracer)
        self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests) or len(self.shadows) > 0 or len(self._waiting) > 0

    def check_integrity(self) -> None:
        """Assert that the bookkeeping of all caches and of the arena is consistent. Must be called between steps."""
        for cache in self.caches.values():
            cache.check_integrity()
        self.arena.check_integrity()

    # ---------------------------------------------------------------- requests
    def submit(self, worker: int, message: Submit) -> Event | None:
        """Queue a request of API worker `worker`; return None, or the event with the error if it is rejected.

        One whose grammar is not compiled yet is queued in the step after that.
        """
        try:
            if self._waiting.add_unless_ready(worker, message):
                return None
            request, shadow = self._factory.make(worker, message, self._requests)
            self._queue(request)
        except Exception as error:
            return Event(worker, make_rejection(message.request_id, error))
        self._requests[request.key] = request
        if shadow is not None:
            self.shadows.plan(request, shadow)
        return None

    def _queue(self, request: Request) -> None:
        """Queue a request, under a fallback if its strategy is at fault. Raises RequestError and StrategyError."""
        try:
            self.scheduler.submit(request)
        except StrategyError:
            if not self._fallbacks.move(request):
                raise
        else:
            self.isolation.begin(request)
            request.siblings.append(request)

    def cancel(self, worker: int, request_id: str, outcome: Outcome = "cancelled", error: Failed | None = None) -> bool:
        """End a request and free its memory, if it has not already ended; return whether it had not.

        Its client gets the `error`, if there is one, after the next step.
        """
        request = self._requests.get((worker, request_id))
        if request is not None:
            self._remove(request, outcome)
        elif not self._waiting.remove(worker, request_id):
            return False
        if error is not None:
            self._late_events.append(Event(worker, error))
        return True

    def cancel_worker(self, worker: int) -> None:
        """Cancel all requests of an API worker that has disconnected."""
        self._waiting.remove_worker(worker)
        for key in [key for key in self._requests if key[0] == worker]:
            self.cancel(*key)

    # ---------------------------------------------------------------- a step
    def step(self) -> StepResult:
        """Schedule and compute one step, and return its results; without requests no row is computed."""
        began = time.monotonic()
        self.memory.add_touched_pages()
        for cache in self.caches.values():
            cache.poll()
        self.memory.drain()
        self._late_events += filter(None, (self.submit(*each) for each in self._waiting.take_ready()))
        with self.tracer.span("schedule"):
            scheduled, preempted, failed = self.scheduler.schedule()
        self._end_failed(failed)
        self._end_stalled(scheduled, preempted)
        self._steps += bool(scheduled)
        timed = bool(scheduled and self.timing_interval) and self._steps % self.timing_interval == 0
        with self.tracer.record(OpTimer(self.model.device)) if timed else nullcontext() as op_timer:
            shadow_rows = self.shadows.schedule(scheduled)
            parts, step_events = self._compute([*scheduled, *shadow_rows])
        self._end_quarantined()
        totals, self._accumulator = self._accumulator, StepAccumulator()
        late_events, self._late_events = self._late_events, []
        block_events = {name: cache.collect_block_events() for name, cache in self.caches.items()}
        report = totals.make_report(
            seconds=time.monotonic() - began,
            parts=parts,
            preemptions=Counter([r.cache.name for r in preempted]),
            failures=self.isolation.collect_faults(),
            evicted_bytes=self.memory.collect_evicted_bytes(),
            block_events={name: events for name, events in block_events.items() if events is not None},
            op_seconds=None if op_timer is None else op_timer.seconds,
            shadows=self.shadows.collect_records(),
            shadow_tokens=count_tokens(shadow_rows),
            rollbacks=self.rollouts.collect_rollbacks(),
            grammars=self.grammars.meter.collect(),
        )
        preemption_events = [Event(r.key[0], Preempted(r.key[1])) for r in preempted]
        late_events += (Event(*comparison) for comparison in self.shadows.collect_comparisons())
        self.rollouts.observe(report.shadows, totals.finished)
        return StepResult([*preemption_events, *step_events, *late_events], report, totals.finished)

    def _compute(self, scheduled: Sequence[Scheduled]) -> tuple[Mapping[str, StepPart], list[Event]]:
        """Compute and commit a step's rows; return counts of rows and tokens by instance, and events for clients."""
        parts: list[Mapping[str, StepPart]] = []
        events: list[Event] = []
        for result in run_step(self._runner, scheduled):
            match result:
                case RowsComputed(part, output):
                    parts.append(part)
                    events += self._update_from_output(output)
                case RequestsFailed(requests, message, code):
                    self._fail(requests, message, code)
        return merge_step_parts(parts), events

    def _update_from_output(self, output: StepOutput) -> list[Event]:
        """Commit the tokens that entered the caches, fork seats for other choices (n > 1), append the sampled tokens.

        Return events for clients.
        """
        output = self._commit_output(output)
        # Not `self.shadows.requests`: a shadow has ended if the request that it repeats could not be committed
        shadow_logits = output.shadow_logits
        output = output.without({each.request for each in output.scheduled if each.request.is_shadow})
        output = self._move_non_finite(output)
        events: list[Event] = []
        for request in [s.request for s in output.scheduled]:
            if request.num_cached_tokens is None:
                events += self._record_admission(request)
            events += report_progress(request) if request.reports_progress else ()
            if (scores := output.sampled.prompt_logprobs.get(request)) is not None:
                request.num_scored_tokens += len(scores.logprobs)
                events.append(Event(request.key[0], scores))
        forks = [
            fork
            for each in output.to_sample
            for fork in self._fork_siblings(each.request, output.siblings[each.request])
        ]
        events += [
            event
            for fork in forks
            if fork.request.num_cached_tokens is None
            for event in self._record_admission(fork.request)
        ]
        inputs, results = [*output.to_sample, *forks], output.sampled.results
        events += [self._finish(each.request) for each in inputs if each.request not in results]
        sampled = [each for each in inputs if each.request in results]
        events += self._append_tokens(sampled, output)
        self.shadows.compare(shadow_logits)
        self._end_finished([each.request for each in sampled], results)
        return events

    def _commit_output(self, output: StepOutput) -> StepOutput:
        """Commit the tokens that entered the caches, and free the slots of rejected draft tokens.

        Requests whose strategies fail end with an error; return the output of the others.
        """
        num_free_pages = self.arena.num_free_pages
        failed_rows = output.batch.commit(output.count_entered_tokens())
        for row, compaction in output.batch.compactions.items():
            self._record_compaction(output.scheduled[row].request, compaction)
        failed = {output.scheduled[i].request: error for i, error in failed_rows}
        failed_instances = {error.instance for error in failed.values()}
        self.isolation.record_steps({s.request.cache.name for s in output.scheduled} - failed_instances)
        for request, _, draft, _ in output.scheduled:
            if draft and request not in failed:
                assert request.seat is not None
                try:
                    request.cache.crop(request.seat, request.seat.length)
                except StrategyError as error:
                    failed[request] = error
        if self.arena.num_free_pages > num_free_pages:  # keys were dropped, or slots of rejected drafts
            self.scheduler.mark_room_changed()
        if not failed:
            return output
        self._end_failed([FailedRequest(*item) for item in failed.items()])
        return output.without(failed.keys())

    def _move_non_finite(self, output: StepOutput) -> StepOutput:
        """Move requests whose first logits are NaN or infinite to fallbacks; return the output of the others."""
        output, failed = self._fallbacks.move_non_finite(output)
        for request in failed:
            self._fail([request], NON_FINITE_LOGITS_MESSAGE.format(request.cache.name), "not_a_number")
        return output

    def _record_compaction(self, request: Request, compaction: Compaction) -> None:
        if request.is_shadow:
            return
        request.num_compactions += 1
        request.compaction_seconds += compaction.seconds
        self.compactions[request.cache.name].add(compaction)
        self._accumulator.compactions[request.cache.name].append(compaction)

    def _record_admission(self, request: Request) -> list[Event]:
        """Record the number of cached prompt tokens, once a request's first row has run; return its Admitted event."""
        assert request.seat is not None
        seat, name = request.seat, request.cache.name
        request.num_cached_tokens, request.miss = (seat.length, None) if request.forked else (seat.cached, seat.miss)
        num_cached = request.num_cached_tokens
        self._accumulator.admissions.append(
            Admission(name, request.num_prompt_tokens, num_cached, request.miss, request.forked)
        )
        worker, request_id = request.key
        queued = request.times.admitted - request.times.arrived
        return [Event(worker, Admitted(request_id, name, request.reason, num_cached, request.miss, queued))]

    def _append_tokens(self, inputs: Sequence[SamplerInput], output: StepOutput) -> list[Event]:
        """Append the sampled tokens to their requests; return events for clients."""
        events, sampled = [], output.sampled
        self.isolation.record_non_finite(each.request for each in inputs if not sampled.results[each.request].is_finite)
        for request, draft, row in inputs:
            result = sampled.results[request]
            if draft:
                request.record_draft(len(draft), result.num_accepted)
                self._accumulator.drafts[request.cache.name].append(DraftRecord(len(draft), result.num_accepted))
            for token in result.tokens:
                self._append_token(request, token)
            self.shadows.add_served_logits(request, output.logits, range(row, row + len(result.tokens)))
            if result.tokens:
                if request.suspects:
                    self.isolation.confirm_suspects(request)
                worker, request_id = request.key
                logprobs = sampled.logprobs[request]
                ends = request.completes_grammar
                message = Tokens(request_id, result.tokens, request.finish_reason, logprobs, len(draft), ends)
                events.append(Event(worker, message))
        return events

    def _append_token(self, request: Request, token: int) -> None:
        before = request.times.last_token
        request.append_token(token, self.model.info.eos_ids)
        self._accumulator.generated_tokens[request.cache.name] += 1
        if before:
            self._accumulator.inter_token_seconds[request.cache.name].append(request.times.last_token - before)

    def _end_finished(self, requests: Sequence[Request], results: Mapping[Request, SampleResult]) -> None:
        """End the requests whose text is complete, whose logits were not finite, or that their grammars end."""
        for request in requests:
            if not results[request].is_finite:
                assert request.seat is not None
                request.cache.discard(request.seat)
                self._fail([request], NON_FINITE_LOGITS_MESSAGE.format(request.cache.name), "not_a_number")
            elif (fault := find_grammar_fault(request, results[request])) is not None:
                self.grammars.meter.failures += 1
                self._fail([request], fault, "grammar_failed", status=400)
            elif request.finish_reason is not None:
                self._remove(request, request.finish_reason)

    def _finish(self, request: Request) -> Event:
        """End a request with max_tokens=0, whose prompt has been computed; return its last event."""
        self._remove(request, "length")
        worker, request_id = request.key
        return Event(worker, Tokens(request_id, [], "length"))

    def _fork_siblings(self, request: Request, siblings: Sequence[SamplerInput]) -> list[SamplerInput]:
        """Fork the seat of a request, whose prompt is computed, for its siblings (other choices of the prompt).

        Return the siblings that were started; memory may not suffice for all.
        """
        forked = [each for each in siblings if self.scheduler.fork(each.request, request)]
        self.shadows.start_forked([each.request for each in forked])
        self._accumulator.forks[request.cache.name] += len(forked)
        return forked

    def _end_failed(self, failed: Sequence[FailedRequest]) -> None:
        """End requests whose strategies were at fault."""
        for request, error in failed:
            self._fail([request], error.message, "strategy_failed")

    def _end_stalled(self, scheduled: Sequence[Scheduled], preempted: Sequence[Request]) -> None:
        """End requests that wait for a strategy at fault, given a step that is to be computed."""
        held_up = [*self.scheduler.list_held_up(), *preempted]
        self._end(self.isolation.find_stalled(held_up, [s.request for s in scheduled]))

    def _end_quarantined(self) -> None:
        """End all requests of an instance that has been put in quarantine."""
        while new := self.isolation.take_new_quarantines():  # a fallback may be at fault as requests are moved to it
            self.rollouts.roll_back_candidates(new)
            self._end(self.isolation.collect_quarantined(new, list(self._requests.values())))
            self.shadows.end_quarantined(new)
            self.isolation.suspend(new)

    def _end(self, ended: Sequence[Ended]) -> None:
        """End requests that isolation says have to end, unless they have ended already."""
        for requests, message, code in ended:
            self._fail([request for request in requests if request.key in self._requests], message, code)

    def _fail(self, requests: Sequence[Request], message: str, code: str, status: int = 500) -> None:
        """End requests with an error, whose events are sent after all others of the step.

        Those whose strategy is at fault are moved to a fallback instead, if nothing of them was sent.
        """
        for request in requests:
            if request.is_shadow:
                self.shadows.fail(request)
                continue
            if code in STRATEGY_CODES and self._fallbacks.move(request):
                continue
            self._remove(request, "error")
            worker, request_id = request.key
            self._late_events.append(Event(worker, Failed(request_id, status, message, code)))

    def _remove(self, request: Request, outcome: Outcome) -> None:
        del self._requests[request.key]
        request.siblings.remove(request)
        tokens = self.isolation.count_tokens(request, outcome)
        self.scheduler.remove(request)
        self.isolation.end(request, outcome)
        record = make_request_record(request, outcome, tokens, self.shadows.end_served(request, outcome))
        self._accumulator.finished.append(record)
        if request.explain and outcome in ("stop", "length"):
            worker, request_id = request.key
            self._late_events.append(Event(worker, Explained(request_id, record)))
