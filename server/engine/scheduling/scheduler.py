"""Who computes what in the next step. Knows requests and the host's face of caches; no tensor, no strategy, no socket.

Continuous batching: each step takes one token of every request that decodes, then parts of prompts, within a budget of
tokens that decoding does not draw on; then admits who waits. A step that is half full and in which a prompt ends takes
no more of them: first tokens come earlier, for a little less throughput. What is left of the budget goes to guesses at
what those who decode will say. A request is preempted by taking its seat: it waits again, and recomputes what it had.

What keeps it moving: a request preempts only those behind it in line, and only if they are not in this step yet; if
nobody could be scheduled for want of room, the last in line gives way. So the first in line always gets what it needs,
which submit() has made sure exists. Who waits makes others give way only to a higher priority, never to an equal one:
those would take turns. Who is not ready just waits: for another's prefill, or for a restore.

A place in line is the time of arrival, moved by the priority: a level is worth some seconds of waiting. So a request
of the lowest priority comes before those of the highest in the end, and once it runs, those do not preempt it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from server.engine.scheduling.request import Request, RequestError
from server.records import WaitReason

if TYPE_CHECKING:
    from cache_strategies.base import KVCache, Seat


class Limits(NamedTuple):
    """What the settings allow."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_seq_len: int
    kv_bytes: int
    kv_overcommit: float
    max_logprob_tokens: int = 2**62  # tokens of prompts whose log-probabilities are computed in one step
    max_passed_over: int = 64  # admissions past a request that has no room, before no request may pass any more
    num_speculative_tokens: int = 0  # in a draft, for requests that do not say how many
    max_speculative_tokens: int = 16  # that a request may ask for
    priority_aging: float = 10.0  # seconds of waiting that are worth one level of priority
    max_priority_wait: float = 600.0  # seconds that a priority moves a request in line, at most


class Scheduled(NamedTuple):
    """A request's row of the step: tokens of its text, and behind its last one guesses at those that follow."""

    request: Request
    num_tokens: int
    draft: Sequence[int] = ()


@dataclass
class _Step:
    """A step being filled."""

    token_budget: int
    logprob_budget: int
    rows: list[Scheduled] = field(default_factory=list)
    scheduled_requests: set[Request] = field(default_factory=set)
    preempted: list[Request] = field(default_factory=list)
    lacks_room: bool = False  # a request had no room
    reserved_tokens: int = 0  # of the budget: not for prompts behind one that ends in this step
    prompt_ends: bool = False

    @property
    def accepts_prompts(self) -> bool:
        """Whether parts of prompts may still enter. Whose prompt ends does not wait for those behind it."""
        return self.token_budget > (self.reserved_tokens if self.prompt_ends else 0)

    def room_for(self, request: Request) -> int:
        """Tokens it may have of this step; one that decodes needs no budget."""
        room = max(self.token_budget, 1)
        return min(room, self.logprob_budget) if request.needs_prompt_logprobs else room

    def add(self, request: Request, num_tokens: int) -> None:
        if request.num_remaining_tokens > 1:
            self.token_budget -= num_tokens
            self.prompt_ends |= num_tokens == request.num_remaining_tokens
        if request.needs_prompt_logprobs:
            self.logprob_budget -= num_tokens
        self.rows.append(Scheduled(request, num_tokens))
        self.scheduled_requests.add(request)


class Scheduler:
    """Holds the requests: `waiting` and `running`, both in line."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._num_waiting: Counter[KVCache] = Counter()  # how many of each instance wait
        self._arrivals = 0
        self._room_changes = 0

    # ---------------------------------------------------------------- requests come and go
    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run, or too many wait."""
        limits, total = self.limits, request.max_total_tokens
        if total > limits.max_seq_len:
            message = (
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens ({request.sampling.max_tokens}) come to "
                f"{total} tokens, and the context is {limits.max_seq_len}: shorten the prompt or lower max_tokens"
            )
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        if (need := request.cache.bytes_for(total)) > (most := request.cache.limit_bytes):
            message = f"needs {need} bytes of KV memory, and {request.cache.name} may hold {most}: ask for fewer tokens"
            raise RequestError(400, message, code="context_length_exceeded", param="prompt")
        free_seats = max(0, limits.max_num_seqs - len(self.running))
        if len(self.waiting) >= limits.max_queued_requests + free_seats:  # a free seat is taken in the next step
            raise RequestError(429, f"{len(self.waiting)} requests wait already: try again later", code="queue_full")
        self._arrivals += 1
        request.arrival_index = self._arrivals
        request.due = request.times.arrived + self._compute_delay(request.priority)
        self._add_waiting(request)

    def _compute_delay(self, priority: int) -> float:
        """Return the seconds by which a priority moves a request in line; negative ones move it forward.

        That is aging without a clock: of two requests, the one that waited longer gains on the other as fast as time
        passes, so their order never changes, and the lowest priority waits for those that come within a bound only.
        """
        longest = self.limits.max_priority_wait
        return max(-longest, min(priority * self.limits.priority_aging, longest))

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, was cancelled or failed, and free its memory."""
        if request.seat is not None:
            self._unseat(request)
        else:
            self._remove_waiting(request)

    def fork(self, request: Request, sibling: Request) -> bool:
        """Give a waiting request a copy of its sibling's seat, if it may run and there is room."""
        assert sibling.seat is not None
        if self._can_run(request, self.running):
            request.seat = request.cache.fork(sibling.seat)
        if request.seat is None:
            return False
        request.forked = True
        self._start_running(request)
        return True

    def count_waiting(self) -> Counter[tuple[str, WaitReason]]:
        """Count the waiting requests by instance and by what they wait for, such as memory or their turn.

        Behind one that found no room when it was last asked, all of its instance wait for memory.
        """
        full = {request.cache.name for request in self._iter_candidates() if request.refused_at >= 0}
        seats = len(self.running) < self.limits.max_num_seqs

        def find_wait_reason(request: Request) -> WaitReason:
            if request.waits_for_sibling:
                return "sibling"
            if not seats:
                return "seats"
            return "memory" if request.cache.name in full else "turn"

        return Counter((request.cache.name, find_wait_reason(request)) for request in self.waiting)

    def mark_room_changed(self) -> None:
        """Note that there may be room where there was none: waiting requests try again."""
        self._room_changes += 1

    def set_kv_bytes(self, kv_bytes: int) -> None:
        """Set the bytes of KV memory that there are from now on."""
        self.limits = self.limits._replace(kv_bytes=kv_bytes)
        self.mark_room_changed()

    # ---------------------------------------------------------------- a step
    def schedule(self) -> tuple[Sequence[Scheduled], Sequence[Request]]:
        """Return the step's rows, and the requests that were preempted for them."""
        tokens = self.limits.max_num_batched_tokens
        step = _Step(tokens, self.limits.max_logprob_tokens, reserved_tokens=tokens // 2)
        self._preempt_for_priority(step)
        while True:
            step.lacks_room = False
            for request in sorted(self.running, key=lambda r: r.num_remaining_tokens > 1):
                if request.seat is not None and (step.accepts_prompts or request.num_remaining_tokens == 1):
                    self._schedule_request(request, step)
            if step.rows or not step.lacks_room:
                break
            self._preempt(self.running[-1], step)
        if not step.preempted:
            self._admit(step)
            self._add_drafts(step)
        return step.rows, step.preempted

    def _schedule_request(self, request: Request, step: _Step) -> None:
        """Add the request's next row, if its cache is ready and there is, or can be made, room."""
        cache, seat = request.cache, request.seat
        assert seat is not None
        if not cache.ready(seat):
            return
        remaining = request.num_remaining_tokens
        num_tokens = min(remaining, step.room_for(request), cache.contract.max_row or remaining)
        if not num_tokens:
            return
        while not cache.grow(seat, num_tokens):
            victim = self._find_victim(request, step)
            if victim is None:
                step.lacks_room = True
                return
            self._preempt(victim, step)
        step.add(request, num_tokens)

    def _add_drafts(self, step: _Step) -> None:
        """Give drafts what the rows have left of the step; no request waits or is preempted for one."""
        for i, (request, num_tokens, _) in enumerate(step.rows):
            room = min(
                step.token_budget,
                step.logprob_budget,
                (request.cache.contract.max_row or step.token_budget + 1) - num_tokens,
            )
            draft = request.propose_draft(room)
            assert request.seat is not None
            if draft and request.cache.grow(request.seat, num_tokens + len(draft)):
                step.rows[i] = Scheduled(request, num_tokens, draft)
                step.token_budget -= len(draft)
                step.logprob_budget -= len(draft)

    def _find_victim(self, request: Request, step: _Step) -> Request | None:
        """Return the request to preempt, from those behind `request`; None if there is none.

        Those that are cheap to recompute come first, then those of its own instance, then the last in line.
        """
        behind = [r for r in self.running if r.queue_key > request.queue_key and r not in step.scheduled_requests]
        if request.cache.at_limit:
            behind = [r for r in behind if r.cache is request.cache]
        return max(
            behind, key=lambda r: (r.cache.contract.replayable, r.cache is request.cache, r.queue_key), default=None
        )

    def _preempt(self, request: Request, step: _Step) -> None:
        self._unseat(request)
        request.num_preemptions += 1
        self._add_waiting(request)
        step.preempted.append(request)

    # ---------------------------------------------------------------- admission
    def _preempt_for_priority(self, step: _Step) -> None:
        """Seat waiting requests of higher priority than running ones; these are preempted, the last in line first."""
        for request in self._iter_candidates():
            lower = [r for r in self.running if r.priority > request.priority and r.queue_key > request.queue_key]
            if not lower or not self._can_seat_without(request, lower):
                return
            while not self._try_seat(request):
                if not lower:
                    request.passed_over = self.limits.max_passed_over  # or they would come back, to give way again
                    return
                self._preempt(lower.pop(), step)

    def _can_seat_without(self, request: Request, lower: Sequence[Request]) -> bool:
        """Return whether a request would have room without `lower`.

        Shared memory counts for each, so this errs towards no.
        """
        stay = [r for r in self.running if r not in lower]
        own = [r for r in stay if r.cache is request.cache]
        return (
            self._can_run(request, stay)
            and _count_bytes([*stay, request]) <= self.limits.kv_bytes
            and _count_bytes([*own, request]) <= request.cache.limit_bytes
        )

    def _admit(self, step: _Step) -> None:
        """Seat waiting requests in order; an instance without room holds up only its own, up to a point."""
        without_room: list[Request] = []
        for request in self._iter_candidates():
            if not step.accepts_prompts or any(r.passed_over >= self.limits.max_passed_over for r in without_room):
                return
            if any(r.cache is request.cache for r in without_room):
                continue
            if not self._try_seat(request):
                if len(self.running) >= self.limits.max_num_seqs:
                    return
                without_room.append(request)
                if len(without_room) == len(self._num_waiting):
                    return
                continue
            for passed in without_room:
                passed.passed_over += 1
            self._schedule_request(request, step)

    def _try_seat(self, request: Request) -> bool:
        """Seat a request and return whether there was room.

        Looks again only when that may have changed: it reads the whole prompt.
        """
        if self.running and request.refused_at == self._room_changes:
            return False
        if self._can_run(request, self.running):
            request.seat = _open_seat(request)
        if request.seat is None:
            request.refused_at = self._room_changes
            return False
        self._start_running(request)
        return True

    def _iter_candidates(self) -> Iterator[Request]:
        """Return the requests that wait for nothing but a seat, in order."""
        return (request for request in self.waiting.copy() if not request.waits_for_sibling)

    def _start_running(self, request: Request) -> None:
        self._remove_waiting(request)
        request.refused_at = -1
        insort(self.running, request, key=lambda r: r.queue_key)
        request.times.admitted = request.times.admitted or time.monotonic()

    def _can_run(self, request: Request, others: Sequence[Request]) -> bool:
        """Return whether a request may run beside `others`, by their number and by the bytes that all may come to."""
        if request.cache.draining:
            return False
        limits = self.limits
        projected = sum(r.cache.bytes_for(r.max_total_tokens) for r in (*others, request))
        return len(others) < limits.max_num_seqs and (not others or projected <= limits.kv_overcommit * limits.kv_bytes)

    def _unseat(self, request: Request) -> None:
        assert request.seat is not None
        self.running.remove(request)
        request.cache.close(request.seat)
        request.seat = None
        self.mark_room_changed()

    def _add_waiting(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.queue_key)
        self._num_waiting[request.cache] += 1

    def _remove_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self._num_waiting[request.cache] -= 1
        if not self._num_waiting[request.cache]:
            del self._num_waiting[request.cache]


def _open_seat(request: Request) -> Seat | None:
    cache, wants = request.cache, request.caching
    seat = cache.open(request.tokens, salt=request.salt, max_cached=request.max_cached)
    if seat is not None:
        cache.retain(seat, priority=wants.priority, ttl=wants.ttl)
    return seat


def _count_bytes(requests: Sequence[Request]) -> int:
    """Return the bytes that requests hold with the tokens they have."""
    return sum(r.cache.bytes_for(len(r.tokens)) for r in requests)
