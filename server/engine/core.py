"""The core of the engine, without its socket: takes requests, computes steps and returns events.

A step is: schedule rows, run them, accept their results, report. Optional features are extensions (extension.py), which
this module does not know by name. A single thread calls the core, and all device calls are made in that thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from cache_strategies.errors import StrategyError
from cache_strategies.memory import Memory
from kernels.tracing import OpTimer
from server.engine.extension import Hooks, StepExtension
from server.engine.instance import Instance
from server.engine.ipc.messages import Admitted, Explained, Failed, Preempted, Progress, Submit, Tokens
from server.engine.isolation.isolation import Isolation
from server.engine.kv_memory import KVMemory
from server.engine.model_runner import ModelRunner, StepOutput, run_step
from server.engine.request_factory import RequestFactory
from server.engine.results import Event, StepResult, report_progress
from server.engine.sampling.sampler import SamplerInput
from server.engine.scheduling.request import Request, make_rejection
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.step import RequestFailure, Scheduled
from server.engine.stats import CompactionTotals, StepAccumulator, make_request_record
from server.records import Admission, Compaction, DraftRecord, FoundPrefix, Outcome

# One step in TIMING_INTERVAL has its operations timed; a prime number, so as not to coincide with periodic work
TIMING_INTERVAL = 61


class Core:
    """The state of a running engine: the model, the caches, and the requests in the scheduler."""

    def __init__(
        self,
        runner: ModelRunner,
        isolation: Isolation,
        memory: Memory,
        scheduler: Scheduler,
        factory: RequestFactory,
        extensions: Sequence[StepExtension] = (),
    ) -> None:
        """Make the core of an engine; the hooks of its `extensions` are called in their order."""
        self.runner = runner
        self.model = runner.model
        self.tracer = runner.tracer
        self.isolation = isolation
        self.instances: Mapping[str, Instance] = isolation.instances
        self.memory = memory
        self.scheduler = scheduler
        self.shares = KVMemory(memory, self.instances, scheduler)
        self.compactions = {name: CompactionTotals() for name in self.instances}
        self.timing_interval = TIMING_INTERVAL  # one step in so many has its operations timed; 0: no step
        self._factory = factory
        self._on = Hooks(extensions)
        self._requests: dict[tuple[int, str], Request] = {}
        self._accumulator = StepAccumulator()
        self._late_events: list[Event] = []  # sent after all others of the step
        self._num_steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests) or any(each.is_busy() for each in self._on.is_busy)

    def check_integrity(self) -> None:
        """Assert that the bookkeeping of all caches and of the memory is consistent. Must be called between steps."""
        for instance in self.instances.values():
            instance.check_integrity()
        self.memory.check_integrity()

    # ---------------------------------------------------------------- requests
    def submit(self, worker: int, message: Submit) -> Event | None:
        """Queue a request of API worker `worker`; return None, or the event with the error if it is rejected.

        One that an extension keeps back is queued in a later step.
        """
        try:
            if any(each.hold(worker, message) for each in self._on.hold):
                return None
            request = self._factory.make(worker, message, self._requests)
            self._queue(request)
        except Exception as error:
            return Event(worker, make_rejection(message.request_id, error))
        self._requests[request.key] = request
        for extension in self._on.queued:
            extension.queued(request)
        return None

    def _queue(self, request: Request) -> None:
        """Queue a request; if its strategy fails, an extension may take it over. Raises RequestError, StrategyError."""
        try:
            self.scheduler.submit(request)
        except StrategyError as error:
            if not self._rescue(RequestFailure.from_fault(request, error)):
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
        elif not any(each.withdraw(worker, request_id) for each in self._on.withdraw):
            return False
        if error is not None:
            self._late_events.append(Event(worker, error))
        return True

    def cancel_worker(self, worker: int) -> None:
        """Cancel all requests of an API worker that has disconnected."""
        for extension in self._on.withdraw:
            extension.withdraw(worker, None)
        for key in [key for key in self._requests if key[0] == worker]:
            self.cancel(*key)

    # ---------------------------------------------------------------- a step
    def step(self) -> StepResult:
        """Schedule and compute one step, and return its results; without requests no row is computed."""
        began = time.monotonic()
        self._begin()
        with self.tracer.span("schedule"):
            rows, preempted, failed, skipped = self.scheduler.schedule()
        self._fail(failed)
        held_up = [*self.scheduler.list_held_up(), *preempted]
        go_on = [*(row.request for row in rows), *skipped]  # or would, with a larger budget
        self._fail_unless_ended(self.isolation.find_stalled(held_up, go_on))
        with self.tracer.record(OpTimer(self.model.device)) if self._is_timed(rows) else nullcontext() as op_timer:
            for extension in self._on.add_rows:
                rows = [*rows, *extension.add_rows(rows)]
            events = [event for output in self._run(rows) for event in self._accept(output)]
        self._end_quarantined()
        return self._report(began, preempted, events, op_timer)

    def _begin(self) -> None:
        """Prepare memory and caches for a step, and queue what extensions have kept back until now."""
        for instance in self.instances.values():
            instance.poll()
        self.shares.update()
        for extension in self._on.begin:
            self._late_events += filter(None, (self.submit(*held) for held in extension.begin()))

    def _is_timed(self, rows: Sequence[Scheduled]) -> bool:
        """Return whether the operations of a step with these rows are timed."""
        self._num_steps += bool(rows)
        return bool(rows and self.timing_interval) and self._num_steps % self.timing_interval == 0

    def _run(self, rows: Sequence[Scheduled]) -> Iterable[StepOutput]:
        """Run a step; yield its outputs, each of which has to be accepted before the next is computed."""
        for result in run_step(self.runner, rows):
            if isinstance(result, StepOutput):
                self._accumulator.add_rows(result.parts)
                yield result
            else:
                self._fail(result)

    def _accept(self, output: StepOutput) -> list[Event]:
        """Commit the tokens that entered the caches and append the sampled ones; return events for clients.

        All rows are committed before any request ends, as a request that ends hands shared blocks to others.
        """
        output = self._commit(output)
        for extension in self._on.committed:
            output = extension.committed(output)
        self._fail(output.failed)
        reported = [
            request
            for request, _, _, _, scores_prompt, _ in output.scheduled
            if scores_prompt or request.num_cached_tokens is None or request.reports_progress
        ]
        events = [event for request in reported for event in self._report_prompt(request, output)]
        parents = [each.request for each in output.to_sample if each.request in output.siblings]
        forked = [fork for request in parents for fork in self._fork(request, output)]
        events += [self._admit(each.request) for each in forked if each.request.num_cached_tokens is None]
        inputs, results = [*output.to_sample, *forked], output.sampled.results
        events += [self._finish(each.request) for each in inputs if each.request not in results]
        sampled = [each for each in inputs if each.request in results]
        for each in sampled:
            events += self._append(each, output)
        for extension in self._on.appended:
            extension.appended(sampled, output)
        for each in sampled:
            self._end_if_complete(each.request, output)
        return events

    def _commit(self, output: StepOutput) -> StepOutput:
        """Commit the tokens that entered the caches, and free the slots of rejected draft tokens.

        Requests whose strategies fail end with an error; return the output of the others.
        """
        free_bytes = self.memory.free_bytes
        counts = output.count_entered_tokens()
        failed = {output.scheduled[i].request: error for i, error in output.batch.commit(counts).items()}
        for i, compaction in output.batch.compactions.items():
            self._record_compaction(output.scheduled[i], compaction)
        for row, num_tokens in zip(output.scheduled, output.batch.num_committed, strict=True):
            if row.request not in failed:
                try:
                    _count_row(row.request, num_tokens)
                except StrategyError as error:
                    failed[row.request] = error
        failed_instances = {error.instance for error in failed.values()}
        self.isolation.record_steps({s.request.instance.name for s in output.scheduled} - failed_instances)
        if self.memory.free_bytes > free_bytes:  # keys were dropped, or slots of rejected drafts
            self.scheduler.mark_room_changed()
        if not failed:
            return output
        self._fail(RequestFailure.from_fault(*each) for each in failed.items())
        return output.without(failed.keys())

    def _record_compaction(self, row: Scheduled, compaction: Compaction) -> None:
        if row.num_observed is not None:
            return  # of an extension, whose rows serve no client
        request = row.request
        request.num_compactions += 1
        request.compaction_seconds += compaction.seconds
        self.compactions[request.instance.name].add(compaction)
        self._accumulator.compactions[request.instance.name].append(compaction)

    def _report_prompt(self, request: Request, output: StepOutput) -> list[Event]:
        """Return what a client learns of its prompt in a step: once how much was cached, its progress, its scores."""
        events: list[Event] = []
        if request.num_cached_tokens is None:
            events.append(self._admit(request))
            if request.reports_progress:  # as llama.cpp does: first what was cached
                worker, request_id = request.key
                events.append(Event(worker, Progress(request_id, request.num_cached_tokens or 0)))
        if request.reports_progress:
            events += report_progress(request)
        if (scores := output.sampled.prompt_logprobs.get(request)) is not None:
            request.num_scored_tokens += len(scores.logprobs)
            events.append(Event(request.key[0], scores))
        return events

    def _admit(self, request: Request) -> Event:
        """Record the number of cached prompt tokens, once a request's first row has run; return its Admitted event."""
        name = request.instance.name
        found = FoundPrefix(request.num_computed_tokens) if request.forked else request.found
        request.num_cached_tokens, request.miss, request.num_recomputed_tokens = num_cached, _, again = found
        self._accumulator.admissions.append(
            Admission(name, request.num_prompt_tokens, num_cached, request.miss, request.forked, again)
        )
        worker, request_id = request.key
        queued = request.times.admitted - request.times.arrived
        return Event(worker, Admitted(request_id, name, request.reason, num_cached, request.miss, queued))

    def _append(self, sampler_input: SamplerInput, output: StepOutput) -> list[Event]:
        """Append the sampled tokens to their request; return the event for its client."""
        request, draft, _ = sampler_input
        result, name = output.sampled.results[request], request.instance.name
        if draft:
            request.record_draft(len(draft), result.num_accepted)
            self._accumulator.drafts[name].append(DraftRecord(len(draft), result.num_accepted))
        for token in result.tokens:
            before = request.times.last_token
            request.append_token(token, self.model.info.eos_ids)
            self._accumulator.generated_tokens[name] += 1
            if before:
                self._accumulator.inter_token_seconds[name].append(request.times.last_token - before)
        if not result.tokens:
            return []
        worker, request_id = request.key
        logprobs, ends = output.sampled.logprobs[request], request.completes_grammar
        return [Event(worker, Tokens(request_id, result.tokens, request.finish_reason, logprobs, len(draft), ends))]

    def _end_if_complete(self, request: Request, output: StepOutput) -> None:
        """End a request whose text is complete, whose logits were not finite, or that its grammar ends."""
        result = output.sampled.results[request]
        if not result.is_finite:
            assert request.sequence is not None
            request.instance.mark_spoiled(request.sequence)
            self._fail([RequestFailure.from_logits(request)])
        elif request.grammar is not None and (fault := request.find_grammar_fault(is_allowed=result.is_allowed)):
            self._fail([RequestFailure(request, fault, "grammar_failed", status=400)])
        elif request.finish_reason is not None:
            self._remove(request, request.finish_reason)

    def _finish(self, request: Request) -> Event:
        """End a request with max_tokens=0, whose prompt has been computed; return its last event."""
        self._remove(request, "length")
        worker, request_id = request.key
        return Event(worker, Tokens(request_id, [], "length"))

    def _fork(self, request: Request, output: StepOutput) -> list[SamplerInput]:
        """Fork the sequence of a request, whose prompt is computed, for its siblings (other choices of the prompt).

        Return the siblings that were started; memory may not suffice for all.
        """
        forked = [each for each in output.siblings[request] if self.scheduler.fork(each.request, request)]
        for extension in self._on.forked:
            extension.forked([each.request for each in forked])
        self._accumulator.forks[request.instance.name] += len(forked)
        return forked

    # ---------------------------------------------------------------- ends
    def _end_quarantined(self) -> None:
        """End all requests of an instance that has been put in quarantine."""
        while new := self.isolation.take_new_quarantines():  # a fallback may be at fault as requests are moved to it
            for extension in self._on.quarantined:
                extension.quarantined(new)
            self._fail_unless_ended(self.isolation.collect_quarantined(new, list(self._requests.values())))
            self.isolation.suspend(new)

    def _fail(self, failures: Iterable[RequestFailure]) -> None:
        """End requests with an error, which is sent after all other events of the step, unless they were rescued."""
        for failure in failures:
            if self._rescue(failure):
                continue
            self._remove(failure.request, "error")
            worker, request_id = failure.request.key
            error = Failed(request_id, failure.status, failure.message, failure.code)
            self._late_events.append(Event(worker, error))

    def _fail_unless_ended(self, failures: Iterable[RequestFailure]) -> None:
        """End requests with an error, as `_fail` does, but those that have ended since the failures were found."""
        self._fail(each for each in failures if each.request.key in self._requests)

    def _rescue(self, failure: RequestFailure) -> bool:
        return any(each.rescue(failure) for each in self._on.rescue)

    def _remove(self, request: Request, outcome: Outcome) -> None:
        del self._requests[request.key]
        request.siblings.remove(request)
        tokens = self.isolation.count_tokens(request, outcome)
        fields = {name: value for each in self._on.ended for name, value in each.ended(request, outcome).items()}
        self.scheduler.remove(request)
        self.isolation.end(request, outcome)
        record = make_request_record(request, outcome, tokens, fields)
        self._accumulator.finished.append(record)
        if request.explain and outcome in ("stop", "length"):
            worker, request_id = request.key
            self._late_events.append(Event(worker, Explained(request_id, record)))

    # ---------------------------------------------------------------- the report
    def _report(
        self, began: float, preempted: Sequence[Request], events: Sequence[Event], op_timer: OpTimer | None
    ) -> StepResult:
        """Return the results of a step: events of preempted requests, the step's own, then late ones."""
        totals, self._accumulator = self._accumulator, StepAccumulator()
        block_events = {name: instance.collect_block_events() for name, instance in self.instances.items()}
        report = totals.make_report(
            seconds=time.monotonic() - began,
            preemptions=Counter([r.instance.name for r in preempted]),
            failures=self.isolation.collect_faults(),
            evicted_bytes=self.shares.collect_evicted_bytes(),
            block_events={name: events for name, events in block_events.items() if events is not None},
            op_seconds=None if op_timer is None else op_timer.seconds,
        )
        for extension in self._on.report:
            self._late_events += extension.report(report, totals.finished)
        late_events, self._late_events = self._late_events, []
        preemptions = [Event(r.key[0], Preempted(r.key[1])) for r in preempted]
        return StepResult([*preemptions, *events, *late_events], report, totals.finished)


def _count_row(request: Request, num_tokens: int) -> None:
    """Count the tokens of a row that was committed. Raises StrategyError."""
    assert request.sequence is not None
    if not request.has_committed:
        request.found = request.instance.read_found(request.sequence, request.num_computed_tokens)
        request.has_committed = num_tokens > 0
    request.num_computed_tokens += num_tokens
