"""The scheduler: chooses the requests, and how many of their tokens, to compute in each step (continuous batching).

Each step takes one token of every decoding request, then parts of prompts (chunked prefill) within a token budget, of
which decoding tokens use nothing; then it admits waiting requests. Once half of the budget is used and a prompt ends in
the step, no more prompt tokens are added: first tokens come earlier, for slightly less throughput. The rest of the
budget goes to draft tokens. A preempted request loses its seat, waits again and recomputes its tokens.

The queue is ordered by arrival time, shifted by priority: one level of priority is worth some seconds of waiting. So a
request of the lowest priority eventually comes before later ones of the highest, which then do not preempt it.

Progress is guaranteed as follows. A running request preempts only requests after it in the queue that are not in the
step yet. If no request can be scheduled for lack of memory, the last one is preempted. So the first request always gets
the memory it needs, and submit() has checked that it fits. A waiting request preempts only requests of lower priority;
with equal priorities two requests could preempt each other forever. A request whose sequence is not ready (another one
computes its prefix, or its tokens are loaded) is skipped.

A request whose strategy is at fault (StrategyError) leaves the step and is returned as failed; all others go on.

Knows requests and the scheduler's methods of caches; neither tensors nor strategies nor sockets.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cache_strategies.errors import StrategyError
from server.engine.ipc.messages import Speculation
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.step import PartialStep, RequestFailure, Schedule
from server.records import WaitReason

if TYPE_CHECKING:
    from cache_strategies.base import KVSequence
    from server.engine.instance import Instance


class Limits(NamedTuple):
    """The scheduler's limits: most are the settings of the same names; `kv_bytes` is the usable KV memory in bytes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_seq_len: int
    kv_bytes: int
    kv_overcommit: float
    max_logprob_tokens: int = 2**62  # maximum number of prompt tokens per step whose log-probabilities are computed
    max_passed_over: int = 64  # maximum number of later requests that are admitted before a request that finds no room
    num_speculative_tokens: int = 0  # maximum length of a draft in tokens, for requests that do not set it
    max_speculative_tokens: int = 16  # highest num_speculative_tokens that a request may set
    priority_aging: float = 10.0  # seconds of waiting that are worth one level of priority
    max_priority_wait: float = 600.0  # maximum seconds by which a priority moves a request in the queue

    def resolve_speculation(self, requested: Speculation | None) -> Speculation:
        """Return the requested speculation; for None the settings' default. Raises RequestError for too long drafts."""
        if requested is None:
            return Speculation(self.num_speculative_tokens)
        if (value := requested.num_speculative_tokens) > (maximum := self.max_speculative_tokens):
            param = "speculative_config.num_speculative_tokens"
            raise RequestError(400, f"{param}: should be at most {maximum} on this server, not {value}", param=param)
        return requested


class Scheduler:
    """Holds the `waiting` and the `running` requests, both sorted by queue_key, and schedules steps."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._num_waiting: Counter[Instance] = Counter()  # number of waiting requests of each instance
        self._refused: set[Request] = set()  # waiting requests for which open() of their strategy last returned none
        self._num_arrivals = 0
        self._room_changes = 0  # counts the times when memory or a seat may have become free
        # Ends what no request needs, to make room for a request of an instance; returns whether it did
        self.release_spare: Callable[[Instance], bool] = lambda instance: False

    # ---------------------------------------------------------------- add and remove requests
    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run or too many requests wait; StrategyError."""
        limits, total = self.limits, request.max_total_tokens
        if request.num_bounded_tokens > limits.max_seq_len:
            message = (
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens ({request.sampling.max_tokens}) add up to "
                f"{total} tokens, more than max_seq_len={limits.max_seq_len}: shorten the prompt or lower max_tokens; "
                "a strategy with an unbounded contract bounds the prompt only"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        request.peak_bytes = needed = request.instance.bytes_for(total)
        if needed > (limit := request.instance.limit_bytes):
            message = (
                f"the request needs {needed} bytes of KV memory, and strategy {request.instance.name!r} may hold "
                f"{limit}: shorten the prompt or lower max_tokens"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        free_seats = max(0, limits.max_num_seqs - len(self.running))
        # Requests that fill free seats in the next step do not count as queued
        if len(self.waiting) >= limits.max_queued_requests + free_seats:
            message = f"{len(self.waiting)} requests are already waiting: try again later"
            raise RequestError(429, message, code="queue_full")
        self._num_arrivals += 1
        request.arrival_index = self._num_arrivals
        request.due = request.times.arrived + self._compute_delay(request.priority)
        self._add_waiting(request)

    def _compute_delay(self, priority: int) -> float:
        """Return the seconds by which a priority moves a request back in the queue; negative ones move it forward.

        This is priority aging without a clock: waiting requests age at the same rate, so their order never changes. As
        the shift is bounded, a request is only overtaken by requests that arrive within twice the bound after it.
        """
        longest = self.limits.max_priority_wait
        return max(-longest, min(priority * self.limits.priority_aging, longest))

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, failed or was cancelled, and free its memory."""
        if request.sequence is not None:
            self._unseat(request)
        elif request in self.waiting:  # not if it failed while a step was scheduled
            self._remove_waiting(request)

    def fork(self, request: Request, sibling: Request) -> bool:
        """Start a waiting request in a fork of the sequence of `sibling`, another choice (n > 1) of its prompt.

        Return False if the request cannot run now or there is no room.
        """
        assert sibling.sequence is not None
        if self._can_run(request, self.running):
            try:
                request.sequence = request.instance.fork(sibling.sequence, sibling.num_computed_tokens)
            except StrategyError:
                return False  # open() is tried instead
        if request.sequence is None:
            return False
        request.forked, request.num_computed_tokens = True, sibling.num_computed_tokens
        self._start_running(request)
        return True

    def count_waiting(self) -> Counter[tuple[str, WaitReason]]:
        """Count the waiting requests by instance and by what they wait for (see WaitReason).

        If a request found no memory when it was last tried, all requests of its instance count as waiting for memory.
        """
        full = {request.instance.name for request in self._iter_candidates() if request.refused_at >= 0}
        seats = len(self.running) < self.limits.max_num_seqs

        def find_wait_reason(request: Request) -> WaitReason:
            if request.waits_for_sibling:
                return "sibling"
            if not seats:
                return "seats"
            return "memory" if request.instance.name in full else "turn"

        return Counter((request.instance.name, find_wait_reason(request)) for request in self.waiting)

    def list_held_up(self) -> list[Request]:
        """Return the requests that only their strategies may hold up: running ones, and those refused by open()."""
        return [*self.running, *self._refused]

    def mark_room_changed(self) -> None:
        """Let waiting requests that found no room be tried again, as memory or a seat may have become free."""
        self._room_changes += 1

    def set_kv_bytes(self, kv_bytes: int) -> None:
        """Set the total bytes of usable KV memory, which fall if the system lacks memory."""
        self.limits = self.limits._replace(kv_bytes=kv_bytes)
        self.mark_room_changed()

    # ---------------------------------------------------------------- a step
    def schedule(self) -> Schedule:
        """Return the step's rows, and the requests that were preempted for them or whose strategy was at fault."""
        tokens = self.limits.max_num_batched_tokens
        step = PartialStep(tokens, self.limits.max_logprob_tokens, reserved_tokens=tokens // 2)
        self._preempt_for_priority(step)
        while True:
            step.lacks_room = False
            decoding = [r for r in self.running if len(r.tokens) - r.num_computed_tokens == 1]
            prompts = [r for r in self.running if len(r.tokens) - r.num_computed_tokens > 1]
            for request in decoding:
                if request.sequence is not None:  # not if it was preempted for one before it
                    self._schedule_request(request, step)
            for request in prompts:
                if request.sequence is not None and step.accepts_prompts:
                    self._schedule_request(request, step)
                elif request.sequence is not None:
                    step.skipped.append(request)
            if step.rows or not step.lacks_room or not self.running:
                break
            self._preempt(self.running[-1], step)
        if not step.preempted:
            self._admit(step)
            self._add_drafts(step)
        return Schedule(step.rows, step.preempted, step.failed, step.skipped)

    def _schedule_request(self, request: Request, step: PartialStep) -> None:
        """Add the request's next row to the step, preempting others for its memory if needed.

        Nothing is added if its cache is not ready, or there is not enough memory or budget.
        """
        scores_prompt = request.sampling.prompt_logprobs is not None and request.needs_prompt_logprobs
        budget = max(step.token_budget, 1)  # a text that decodes needs no budget for its token
        if scores_prompt:
            budget = min(budget, step.logprob_budget)
        try:
            with request.instance.guard["schedule"]:
                num_tokens = _choose_row_length(request, budget)
                has_room = not num_tokens or _find_room(request, num_tokens)
            while not has_room:
                if not self._make_room(request, step):
                    return
                with request.instance.guard["schedule"]:
                    has_room = _find_room(request, num_tokens)
        except StrategyError as error:
            self._unseat(request)
            step.failed.append(RequestFailure.from_fault(request, error))
            return
        if num_tokens:
            step.add(request, num_tokens, scores_prompt=scores_prompt)
        elif not budget:
            step.skipped.append(request)

    def _make_room(self, request: Request, step: PartialStep) -> bool:
        """Free memory for a request that was refused room; return False if it has to wait."""
        if request.refusal != "memory":
            return False  # no memory was refused, so that preempting others would be of no use
        if self.release_spare(request.instance):
            return True
        victim = self._find_victim(request, step)
        if victim is None:
            step.lacks_room = True
            return False
        self._preempt(victim, step)
        return True

    def _add_drafts(self, step: PartialStep) -> None:
        """Add draft tokens to decode rows within the rest of the budget; no request waits or is preempted for them."""
        for i, row in enumerate(step.rows):
            request = row.request
            if request.proposer is None:
                continue
            draft = request.propose_draft(min(step.token_budget, step.logprob_budget))
            if draft and (draft := self._cut_draft(request, row.num_tokens, draft)):
                step.rows[i] = row._replace(draft=draft)
                step.token_budget -= len(draft)
                step.logprob_budget -= len(draft)

    @staticmethod
    def _cut_draft(request: Request, num_tokens: int, draft: list[int]) -> list[int]:
        """Return as much of a draft as there is room for after a row's tokens; nothing if the strategy is at fault.

        Without drafts the row may still be computed.
        """
        assert request.sequence is not None
        try:
            with request.instance.guard["schedule"]:
                longest = limit_row(request.sequence, request.num_computed_tokens, num_tokens + len(draft))
                draft = draft[: longest - num_tokens]
                return draft if draft and _find_room(request, num_tokens + len(draft)) else []
        except StrategyError:
            return []

    def _find_victim(self, request: Request, step: PartialStep) -> Request | None:
        """Return the request to preempt for `request`, from those after it in the queue; None if there is none.

        Preferred are requests whose strategy gets the same state when tokens are recomputed (replayable), then those of
        the same instance as `request`, then the last in the queue.
        """
        later = [r for r in self.running if r.queue_key > request.queue_key and r not in step.scheduled_requests]
        if request.instance.at_limit or not request.peak_bytes:
            later = [r for r in later if r.instance is request.instance]
        return max(
            later,
            key=lambda r: (r.instance.contract.replayable, r.instance is request.instance, r.queue_key),
            default=None,
        )

    def _preempt(self, request: Request, step: PartialStep) -> None:
        self._unseat(request)
        request.num_preemptions += 1
        self._add_waiting(request)
        step.preempted.append(request)

    # ---------------------------------------------------------------- admission
    def _preempt_for_priority(self, step: PartialStep) -> None:
        """Admit waiting requests by preempting running ones of lower priority, the last in the queue first."""
        for request in self._iter_candidates():
            lower = [r for r in self.running if r.priority > request.priority and r.queue_key > request.queue_key]
            if not lower or not self._can_seat_without(request, lower):
                return
            while not self._try_seat(request, step) and request.sequence is None and request in self.waiting:
                if request.refusal == "nothing":
                    break  # no memory was refused, so that preempting others would be of no use
                if not lower:
                    # Nothing may overtake `request`: else the preempted ones would be admitted and preempted again.
                    request.passed_over = self.limits.max_passed_over
                    return
                self._preempt(lower.pop(), step)

    def _can_seat_without(self, request: Request, lower: Sequence[Request]) -> bool:
        """Return whether a request would have room if the running requests `lower` were preempted.

        Shared memory counts for each of its requests, so the result may be False although there would be room.
        """
        others = [r for r in self.running if r not in lower]
        own = [r for r in others if r.instance is request.instance]
        return (
            self._can_run(request, others)
            and sum(map(_count_bytes, [*others, request])) <= self.limits.kv_bytes
            and sum(map(_count_bytes, [*own, request])) <= request.instance.limit_bytes
        )

    def _admit(self, step: PartialStep) -> None:
        """Admit waiting requests in order.

        A request without room only blocks its own instance, until max_passed_over later requests have overtaken it.
        """
        without_room: list[Request] = []
        for request in self._iter_candidates():
            if not step.accepts_prompts or any(r.passed_over >= self.limits.max_passed_over for r in without_room):
                return
            if any(r.instance is request.instance for r in without_room):
                continue
            if not self._try_seat(request, step):
                if request not in self.waiting:
                    continue  # its strategy was at fault
                if len(self.running) >= self.limits.max_num_seqs:
                    return
                without_room.append(request)
                if len(without_room) == len(self._num_waiting):
                    return
                continue
            for passed in without_room:
                passed.passed_over += passed.refusal != "nothing"  # which keeps no others waiting
            self._schedule_request(request, step)

    def _try_seat(self, request: Request, step: PartialStep) -> bool:
        """Open a seat for a waiting request and start it; return False if it cannot run or there is no room.

        A request is not tried again until room may have become free, as open() hashes its whole prompt. If its strategy
        is at fault, it fails and waits no more.
        """
        if self.running and request.refused_at == self._room_changes:
            return False
        if self._can_run(request, self.running):
            try:
                request.sequence = _open_sequence(request)
                while request.sequence is None and request.refusal == "memory" and self.release_spare(request.instance):
                    request.sequence = _open_sequence(request)
                if request.sequence is None:
                    self._refused.add(request)
            except StrategyError as error:
                self._remove_waiting(request)
                step.failed.append(RequestFailure.from_fault(request, error))
                return False
        else:
            request.refusal = None
            self._refused.discard(request)  # not its strategy holds it up now, but the limits of requests or memory
        if request.sequence is None:
            request.refused_at = self._room_changes
            return False
        self._start_running(request)
        return True

    def _iter_candidates(self) -> Iterator[Request]:
        """Return the waiting requests in order, without those that wait for another choice (n > 1) of their prompt."""
        return (request for request in self.waiting.copy() if not request.waits_for_sibling)

    def _start_running(self, request: Request) -> None:
        self._remove_waiting(request)
        request.refused_at = -1
        insort(self.running, request, key=lambda r: r.queue_key)
        request.times.admitted = request.times.admitted or time.monotonic()

    def _can_run(self, request: Request, others: Sequence[Request]) -> bool:
        """Return whether a request may run beside `others`, by their number and the memory they may need at most."""
        if request.instance.draining:
            return False
        limits = self.limits
        projected = sum(r.peak_bytes for r in (*others, request))
        return len(others) < limits.max_num_seqs and (not others or projected <= limits.kv_overcommit * limits.kv_bytes)

    def _unseat(self, request: Request) -> None:
        assert request.sequence is not None
        self.running.remove(request)
        request.instance.close(request.sequence)
        request.sequence, request.num_computed_tokens, request.has_committed, request.refusal = None, 0, False, None
        self.mark_room_changed()

    def _add_waiting(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.queue_key)
        self._num_waiting[request.instance] += 1

    def _remove_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self._refused.discard(request)
        self._num_waiting[request.instance] -= 1
        if not self._num_waiting[request.instance]:
            del self._num_waiting[request.instance]


def update_length(request: Request) -> bool:
    """Return whether a request of which no row was committed may have one now; called under a guard of its instance.

    Not while another sequence computes its prefix; if that ends early, this one may have to compute more than before.
    """
    sequence = request.sequence
    assert sequence is not None
    if not sequence.ready():
        return False
    request.num_computed_tokens = request.instance.read_length(sequence, request.num_computed_tokens)
    return True


def _choose_row_length(request: Request, budget: int) -> int:
    """Return the number of tokens of a request's next row within a budget; 0 if it may have none now.

    Called under a guard of its instance.
    """
    sequence = request.sequence
    assert sequence is not None
    if not request.has_committed and not update_length(request):
        return 0
    length = request.num_computed_tokens
    num_tokens = min(len(request.tokens) - length, budget)
    return limit_row(sequence, length, num_tokens) if sequence.stop is not None and num_tokens else num_tokens


def limit_row(sequence: KVSequence, length: int, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens after `length` the next row may have; called under a guard."""
    stop = sequence.stop
    if stop is None:
        return num_tokens
    if type(stop) is not int:  # else what is left of the step's budget, for all strategies, would be of that type
        raise TypeError(f"a sequence of {length} tokens has a {type(stop).__name__} as its stop, not an int")
    if stop <= length:
        raise ValueError(f"a sequence of {length} tokens has stop={stop}")
    return min(stop - length, num_tokens)


def has_room(sequence: KVSequence, length: int, num_tokens: int) -> bool:
    """Return whether there is memory for `num_tokens` tokens after `length`; called under a guard."""
    return sequence.room >= length + num_tokens or sequence.reserve(num_tokens)


def _find_room(request: Request, num_tokens: int) -> bool:
    """Return whether there is room for the next tokens of a request; else note whether memory was refused."""
    sequence, memory = request.sequence, request.instance.memory
    assert sequence is not None
    num_refusals = memory.num_refusals
    if has_room(sequence, request.num_computed_tokens, num_tokens):
        return True
    # A strategy with memory of its own is believed
    was_refused = memory.num_refusals > num_refusals or not request.peak_bytes
    request.refusal = "memory" if was_refused else "nothing"
    return False


def _open_sequence(request: Request) -> KVSequence | None:
    """Open a sequence for a waiting request, if the strategy has room; else note whether memory was refused."""
    instance, caching = request.instance, request.caching
    num_refusals, has_free_seat = instance.memory.num_refusals, instance.has_free_seat
    request.refusal = None
    opened = instance.open(
        request.tokens,
        salt=request.salt,
        max_cached=request.max_cached,
        priority=caching.priority,
        ttl=caching.ttl,
    )
    if opened is None:
        was_refused = instance.memory.num_refusals > num_refusals or not has_free_seat or not request.peak_bytes
        request.refusal = "memory" if was_refused else "nothing"
    else:
        request.num_computed_tokens = opened.length
    return opened


def _count_bytes(request: Request) -> int:
    """Return the bytes of KV memory that a request needs for the tokens it has now, or at most."""
    try:
        return request.instance.bytes_for(len(request.tokens))
    except StrategyError:
        return request.peak_bytes
